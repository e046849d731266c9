"""The versions of PyTorch that refimpl is tested with, and packages that do not fit the PyTorch that is installed."""

import re
import traceback
from importlib import metadata

TESTED = ("2.11", "2.13", "2.14")  # of torch: docs/versions.md says with which other packages


def untested(version: str) -> str | None:
    """Return a sentence on a `version` of torch that is newer than the newest tested one; None for any other."""
    newest = TESTED[-1]
    if minor_of(version) <= minor_of(newest):
        return None
    return f"refimpl is tested up to torch {newest}; here is torch {version}"


def minor_of(version: str) -> tuple[int, ...]:
    """Return (2, 14) of "2.14.1+cu130"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def misfit(error: object) -> str | None:
    """Return what to do about an error, or its text, that a torchvision of another build of torch causes; else None.

    The torchvision that a package index has by default is compiled for one build of torch. Beside another, such as a
    CPU build, `import torchvision` fails, and with it the model classes of transformers, timm and peft.
    """
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    if "operator torchvision::" not in text:
        return None
    ours, theirs = (metadata.version(name) for name in ("torchvision", "torch"))
    return (f"torchvision {ours} was built for another torch than {theirs} and cannot be imported: run `pip uninstall "
            "torchvision` if you do not need it (transformers and peft work without), else install it from the index "
            "that your torch came from")
