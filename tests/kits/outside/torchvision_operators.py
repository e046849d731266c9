"""Lets torchvision be imported beside a build of torch that its compiled operators were not made for.

torchvision's wheel from PyPI is made for the CUDA build of torch. Beside the CPU build its library cannot be loaded,
and `import torchvision` fails as it describes operators that do not exist; then timm and transformers fail too. So the
set-up puts it aside (tools/fit.py). No model here detects objects: a name and a schema of those operators suffice.
Import this before torchvision, in each process.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ASIDE = Path(sys.prefix) / "torchvision-without-operators"
if importlib.util.find_spec("torchvision") is None and _ASIDE.is_dir():
    sys.path.append(str(_ASIDE))


def _library_loads():
    """As torchvision does itself: its operators are there afterwards, or the library is not one for this torch."""
    found = importlib.util.find_spec("torchvision")
    if found is None:  # it is not installed: nobody asks for its operators
        return True
    folder = Path(found.origin).parent
    try:
        for path in folder.glob("_C*.so"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


if not _library_loads():
    library = torch.library.Library("torchvision", "DEF")  # the operators live as long as this
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
