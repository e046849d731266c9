"""What a rehearsed script may write: new files, and nothing over an old one. Without numbers, no weights at all.

Values on a device that computes nothing are not the run's. So a checkpoint of them must not take the place of a real
one: `torch.save`, safetensors and whatever opens a file of the user's for writing are stopped by name. New files, as of
a log, are left where they are.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch

_WRITING = os.O_WRONLY | os.O_RDWR
_watching = []  # the Guard that is on: an audit hook cannot be taken back


class WouldOverwrite(PermissionError):
    """Says which file the script was about to replace or to fill with what the device does not have."""


class Guard:
    """A context that stops writes over files that were there before, and saved tensors altogether."""

    def __enter__(self):
        self._made, self._saves = set(), {}
        # Not asked for in the hook: Python may hold a lock of its own when it opens a file.
        self._free = ("/dev/", "/proc/", os.path.realpath(tempfile.gettempdir()) + os.sep)
        if not _watching:
            sys.addaudithook(_audit)
        _watching[:] = [self]
        for module, name in _savers():
            self._saves[module, name] = original = getattr(module, name)
            setattr(module, name, _refusing(name, original))
        return self

    def __exit__(self, *exception):
        _watching[:] = [None]
        for (module, name), original in self._saves.items():
            setattr(module, name, original)

    def check(self, path):
        """Raise WouldOverwrite if a file is the user's: it is there, and was not made by this run."""
        path = os.path.realpath(path)
        if path in self._made or path.startswith(self._free):
            return
        if os.path.isfile(path) and not _cached(path):
            raise WouldOverwrite(f"the script would write over {path}, and what it has on a device that computes "
                                 "nothing is not the run's: --numbers computes it, or give it another folder")
        self._made.add(path)


def _savers():
    yield from ((torch, "save"), (torch.jit, "save"), (torch._C, "PyTorchFileWriter"))  # the last writes in C++
    if importlib.util.find_spec("safetensors"):
        import safetensors.torch

        yield from ((safetensors, "serialize_file"), (safetensors.torch, "save_file"),
                    (safetensors.torch, "serialize_file"))


def _refusing(name, original):
    def save(*args, **kwargs):
        if any(hasattr(each, "getvalue") for each in (*args, *kwargs.values())):  # a copy in memory, as of an average
            return original(*args, **kwargs)
        raise WouldOverwrite(f"{name}: what a device that computes nothing holds is not the run's, so it is not saved; "
                             "--numbers computes it, or end the rehearsal before (--steps)")
    return save


def _audit(event, args):
    """Python tells of each file that it opens, renames or removes."""
    if not _watching or _watching[0] is None:
        return
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        mode, flags = args[1], args[2] if len(args) > 2 else 0
        if (isinstance(mode, str) and set(mode) & set("wa+x")) or (mode is None and flags & _WRITING):
            _watching[0].check(os.fspath(args[0]))
    elif event in ("os.remove", "os.truncate") and isinstance(args[0], (str, bytes, os.PathLike)):
        _watching[0].check(os.fspath(args[0]))
    elif event == "os.rename" and isinstance(args[1], (str, bytes, os.PathLike)):
        _watching[0].check(os.fspath(args[1]))


def _cached(path):
    """Say whether a file is a library's own: compiled modules, and what is in a cache of the user's."""
    parts = Path(os.fsdecode(path)).parts
    return "__pycache__" in parts or ".cache" in parts or "site-packages" in parts or ".triton" in parts
