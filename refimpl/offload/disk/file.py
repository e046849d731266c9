"""Aligned blocks of one file that has no name, past the kernel's page cache where the file system allows it.

A file without a name takes space as long as a process has it open, and not a moment longer: the kernel frees it when
the process ends, also by `kill -9` or a crash. On Linux O_TMPFILE makes one; elsewhere it is made with a name, which is
removed at once. See open(2).

With O_DIRECT the disk writes from the caller's memory and reads into it: the kernel keeps no copy, so host memory is
what the caller has. Then addresses, offsets and lengths must be multiples of the device's block. BLOCK serves them all.
A file system without O_DIRECT (some network and memory ones) gets ordinary calls.
"""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from ..errors import StoreError

BLOCK = 4096  # bytes
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone
HINTS = {
    errno.ENOSPC: "the disk is full: free some space, or pass another folder",
    errno.EDQUOT: "the user's quota is used up: free some space, or pass another folder",
    errno.EFBIG: "the process may not write a file of that size (`ulimit -f`)",
    errno.EIO: "the device failed: pass a folder on another, and load the last checkpoint",
    errno.ESTALE: "the file has vanished from its server: load the last checkpoint",
    errno.EACCES: "pass a folder that this user can write to",
}


def aligned(nbytes):
    """Return `nbytes` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class BlockFile:
    """Makes a file without a name in `folder`. `direct`: whether it goes past the page cache.

    Raises FileNotFoundError, NotADirectoryError or PermissionError that names a folder which cannot hold a file.
    """

    def __init__(self, folder):
        self.folder, self.nbytes = Path(folder), 0
        if not self.folder.exists():
            raise FileNotFoundError(errno.ENOENT, "no such folder; make it, or pass another one", str(folder))
        if not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a store needs a folder to make its file in", str(folder))
        try:
            self._fd, self.direct = self._open()
        except PermissionError as error:
            raise PermissionError(error.errno, "the folder is not writable; pass one that is", str(folder)) from None
        except OSError as error:
            raise self._error("make a file", error) from error

    def _open(self):
        """Return (descriptor, whether it is direct)."""
        for direct in [DIRECT, 0] if DIRECT else [0]:
            try:
                return self._unnamed(direct), bool(direct)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        raise AssertionError("unreachable")

    def _unnamed(self, flags):
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
            except OSError as error:  # EISDIR: a kernel that does not know the flag
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                    raise
        fd, name = tempfile.mkstemp(dir=self.folder, prefix=".store-")
        try:
            return os.open(name, os.O_RDWR | flags) if flags else os.dup(fd)
        finally:
            os.close(fd)
            os.remove(name)

    def reserve(self, nbytes):
        """Let the file have at least `nbytes`, on the disk: no write can find it full. StoreError if it is full now."""
        if nbytes <= self.nbytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                # ftruncate would leave a hole, which a later write may find no room for
                os.posix_fallocate(self._fd, self.nbytes, nbytes - self.nbytes)
            else:
                os.ftruncate(self._fd, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was reserved of it is of no use
                os.ftruncate(self._fd, self.nbytes)
            raise self._error(f"reserve {nbytes - self.nbytes:,} bytes more than {self.nbytes:,}", error) from error
        self.nbytes = nbytes

    def write(self, buffer, offset):
        """Write all of `buffer`, a memoryview whose address and length are aligned."""
        self._transfer(os.pwritev, buffer, offset, "write")

    def read(self, buffer, offset):
        """Fill `buffer` from `offset`."""
        self._transfer(os.preadv, buffer, offset, "read")

    def _transfer(self, call, buffer, offset, verb):
        """A call may transfer less than asked for: the next one goes on where it stopped. One that transfers nothing
        never will."""
        done = 0
        while done < len(buffer):
            what = f"{verb} {len(buffer):,} bytes at {offset:,}"
            try:
                count = call(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                if self._go_on_in_cache(error):
                    continue
                raise self._error(what, error) from error
            if count <= 0:
                raise StoreError(None, f"cannot {what} of the store's file in {self.folder}: only {done:,} bytes came "
                                       "through, as if somebody had cut the file; load the last checkpoint")
            done += count

    def _go_on_in_cache(self, error):
        """Leave O_DIRECT if that is what a call did not like: after a short one, the rest may not be aligned."""
        if error.errno != errno.EINVAL or not self.direct:
            return False
        import fcntl  # no Windows has it, nor O_DIRECT

        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~DIRECT)
        self.direct = False
        return True

    def _error(self, what, error):
        hint = HINTS.get(error.errno, "pass another folder, and load the last checkpoint")
        return StoreError(error.errno, f"cannot {what} of the store's file in {self.folder}: {error.strerror}; {hint}")

    def close(self):
        """Give the file up, and its space back."""
        os.close(self._fd)
