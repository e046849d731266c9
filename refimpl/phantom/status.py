"""What a process knows of the device without kernels: whether it is on, and whether other ranks are pretended."""

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctypes import CDLL

VARIABLE = "REFIMPL_PHANTOM"
pretended = set()  # "group" once other ranks are, in this process (group.py)


def running() -> bool:
    """Say whether CUDA's devices in this process are without kernels."""
    return VARIABLE in os.environ


def environment_without() -> dict[str, str]:
    """Return the environment of a process that is to have no device, or one of its own."""
    return {key: value for key, value in os.environ.items() if not key.startswith(VARIABLE)}


def pretending() -> bool:
    """Say whether the other ranks of this process's group are not there (group.py)."""
    return "group" in pretended


def libphantom() -> "CDLL":
    """Return the library of the device that is on, as a ctypes.CDLL. RuntimeError if none is."""
    if not running():
        raise RuntimeError("no device without kernels is on: call phantom.start before torch is imported")
    return ctypes.CDLL(os.path.join(os.environ[VARIABLE], "libphantom.so"))


def words(torch_version: str) -> str:
    """Return what is to be said beside anything that is read on the device."""
    version = torch_version.partition("+")[0]
    return f"PyTorch {version}'s allocator on a device without kernels: bytes only, no numbers, no time"
