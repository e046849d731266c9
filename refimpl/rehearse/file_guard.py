"""What a rehearsed script may write: new files, and nothing over an old one. Without numbers, no weights at all.

Values on a device that computes nothing are not the run's. So a checkpoint of them must not take the place of a real
one: `torch.save`, safetensors and PyTorch's distributed checkpoints do nothing and are counted by the line that calls
them, and what would open a file of the user's for writing is stopped by name. New files, as of a log, are left where
they are, and named. Python tells of the files that it opens itself: what a library opens in C, as HDF5 does, and other
programs that a script starts, are not seen.
"""

import functools
import importlib.util
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from .value_guard import caller

_WRITING = os.O_WRONLY | os.O_RDWR


class WouldOverwrite(PermissionError):
    """Says which file the script was about to replace or to fill with what the device does not have."""


class FileGuard:
    """A context that stops writes over files that were there before but `allowed`, and skips saves of tensors.

    It stays on when it is left: a script may write at exit. `skipped`: {"save at train.py:12": how often}.
    """

    def __init__(self, allowed=None):
        self.skipped, self._made = Counter(), {os.path.realpath(allowed)} if allowed else set()

    def __enter__(self):
        sys.addaudithook(functools.partial(_audit, self))
        for owner, name in _savers():
            setattr(owner, name, _skipping(self.skipped, name, getattr(owner, name)))
        return self

    def __exit__(self, *exception):
        """Leave it on."""

    @property
    def new(self):
        """Return what the run has made and left, but for what lies where temporary files do."""
        temporary, here = (os.path.realpath(path) + os.sep for path in (tempfile.gettempdir(), os.getcwd()))
        return sorted(path for path in self._made if os.path.exists(path)
                      and (path.startswith(here) or not path.startswith(temporary)))

    def check(self, path, folder=-1):
        """Raise WouldOverwrite if a file is the user's: it is there, and neither it nor a folder around it was made by
        this run. `folder`: a descriptor that `path` is relative to."""
        path = os.path.realpath(os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else "",
                                             os.fsdecode(path)))
        if path.startswith(("/dev/", "/proc/")) or _cached(path) or not self._made.isdisjoint(_around(path)):
            return
        if os.path.isfile(path):
            raise WouldOverwrite(f"{path} was there before, and a rehearsal would write over it, move or remove it: a "
                                 "device that computes nothing has nothing to keep. Give the script another folder, or "
                                 "compute its values (--numbers)")
        self._made.add(path)

    def made(self, folder):
        """Note a folder that the run makes: what will lie in it is its own. No-op for one that is there already."""
        if not os.path.exists(folder):
            self._made.add(os.path.realpath(os.fsdecode(folder)))


def _savers():
    yield from ((owner, "save") for owner in (torch, torch.serialization, torch.jit, torch.jit.ScriptModule,
                                              torch.jit.RecursiveScriptModule))
    yield from ((torch.autograd.profiler.profile, "export_chrome_trace"), (torch._C, "PyTorchFileWriter"))
    if torch.distributed.is_available() and "WORLD_SIZE" in os.environ:
        yield from ((importlib.import_module("torch.distributed.checkpoint"), name) for name in ("save", "async_save"))
    if importlib.util.find_spec("safetensors"):
        yield from ((importlib.import_module("safetensors.torch"), name) for name in ("save_file", "serialize_file"))


def _skipping(skipped, name, original):
    def save(*args, **kwargs):
        if any(hasattr(each, "getvalue") for each in (*args, *kwargs.values())):  # a copy in memory, as of an average
            return original(*args, **kwargs)
        if name == "PyTorchFileWriter":
            raise WouldOverwrite("a file of tensors is about to be written from C++, whose values are not the run's: "
                                 "--numbers computes them")
        skipped[f"{name} at {caller()}"] += 1
    return save


def _audit(guard, event, args):
    """Python tells of each file that it opens, renames or removes, and of each folder that it makes."""
    if event == "os.exec":
        raise WouldOverwrite("the script puts another program in its place, whose bytes and files are not seen")
    if not args or not isinstance(args[0], (str, bytes, os.PathLike)):
        return
    if event == "open":
        mode, flags = args[1], args[2] if len(args) > 2 else 0
        if (isinstance(mode, str) and set(mode) & set("wa+x")) or (mode is None and flags & _WRITING):
            guard.check(args[0])
    elif event == "os.mkdir":
        guard.made(args[0])
    elif event in ("os.truncate", "sqlite3.connect"):
        guard.check(args[0])
    elif event == "os.remove":
        guard.check(args[0], args[1])
    elif event == "os.rename":
        guard.check(args[0], args[2])
        guard.check(args[1], args[3])


def _around(path):
    """Return a path and the folders around it."""
    return {path, *map(str, Path(path).parents)}


def _cached(path):
    """Say whether a file is a library's own: compiled modules, and what is in a cache of the user's."""
    parts = Path(path).parts
    return bool({"__pycache__", ".cache", "site-packages", ".triton"} & {*parts}) or any(
        part.startswith("torchinductor_") for part in parts)
