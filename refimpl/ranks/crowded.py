"""Errors of a launch on a machine that is full, in a sentence that says what to do: open files, temporary files."""

import contextlib
import errno
import os
import resource
import tempfile

TOO_MANY = os.strerror(errno.EMFILE)  # what all errors say for it, torch's too


def more_open_files():
    """Say how to raise the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return f"a process may have {soft} files open here: who runs this machine can raise that (limits.conf; " \
               "docker run --ulimit nofile=65536)"
    return f"a process may have {soft} files open here: raise that with ulimit -n {hard} in the shell, or with " \
           f"resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard})) before the launch"


@contextlib.contextmanager
def open_files_named(size):
    """Say what a launch of `size` ranks needs, in the error of a process that can have no more files open."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(errno.EMFILE, f"{TOO_MANY}: a launch of {size} rank{'s' * (size != 1)} opens about "
                                    f"{4 * size + 12} more in its caller, and {more_open_files()}") from error


@contextlib.contextmanager
def temporary_file(*parts):
    """Write bytes to a temporary file and give that. OSError that names the folder, if there is no room in it."""
    with tempfile.TemporaryFile(buffering=0) as file:
        try:
            for part in map(memoryview, parts):
                while part:
                    part = part[file.write(part):]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size = sum(memoryview(part).nbytes for part in parts)
            raise OSError(error.errno, f"{os.strerror(error.errno)} in {tempfile.gettempdir()}, where ranks read the "
                                       f"function and its arguments, {size:,} bytes: free some, or set TMPDIR to a "
                                       "folder with more before Python starts") from error
        yield file
