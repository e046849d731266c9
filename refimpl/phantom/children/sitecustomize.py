"""Gives a Python process that has inherited the variables of a device without kernels that device, before torch."""

import importlib.machinery
import importlib.util
import os
import sys

if os.environ.get("REFIMPL_PHANTOM"):
    from refimpl import phantom

    phantom.load()

# The sitecustomize that this one stands in front of.
_paths = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(os.path.abspath(__file__))]
if (_next := importlib.machinery.PathFinder.find_spec("sitecustomize", _paths)) and _next.loader:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
