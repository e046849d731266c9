"""Opens files that others wrote: regular ones, of a size that the reader has said."""

import contextlib
import os
import stat


@contextlib.contextmanager
def opened(path, limit):
    """Open a file of at most `limit` bytes, to read bytes. ValueError for a larger one, and for a pipe or a device,
    which might be waited for; OSError if there is no file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is a pipe or a device: expected a file")
        if found.st_size > limit:
            raise ValueError(f"{path} has {found.st_size:,} bytes: expected at most {limit:,}")
        yield file


def text_of(path, limit):
    """Return the text of such a file, in UTF-8. ValueError, which may be a UnicodeDecodeError, for another."""
    with opened(path, limit) as file:
        return file.read().decode("utf-8")
