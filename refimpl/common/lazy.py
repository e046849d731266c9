"""Names of a package that are loaded at their first use."""

import importlib
import sys


def lazily(package, modules):
    """Return the `__getattr__` and `__dir__` of a package, of {module: the names that it has}: `lazily(__name__,
    {".drawing": "draw"})`. No module may have the name of what it holds: importing it would set that name, too."""
    of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name):
        if name not in of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(of[name], package), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *of})  # dir() names them before they are loaded
