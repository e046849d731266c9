"""Compiles a C++ kernel once, and keeps what was compiled in the user's cache directory.

The name of the file has a hash of the source, the compiler, its flags and the processor's features, so another machine
that shares the directory makes its own. What is loaded runs with the user's rights. So the directory and the file have
to be the user's own, and nobody else may write to them. A file cut short would end the process that loads it (SIGBUS).
So its size and hash stand beside it, and one that does not fit them is compiled again.

It is written elsewhere, and moved to its place once all of it is on the disk: ranks that compile it at the same time
get whole files, and the last one stays.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # for the compiler


class CannotCompile(RuntimeError):
    """Says why there is no compiled kernel."""


def cache_directory():
    """Return where compiled kernels stay: $XDG_CACHE_HOME/refimpl; ~/.cache/refimpl if that is not set, is relative or
    is another user's. CannotCompile without a home directory."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(said) and (not os.path.exists(said) or os.stat(said).st_uid == os.getuid()):
        return Path(said) / "refimpl"
    try:
        return Path.home() / ".cache" / "refimpl"
    except RuntimeError as error:
        raise CannotCompile("there is no home directory to keep a compiled kernel in: set XDG_CACHE_HOME to an "
                            "absolute path, to a directory of your own") from error


def compiler():
    """Return the path of a C++ compiler: $CXX, or the first of c++, g++ and clang++. CannotCompile without one."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise CannotCompile(f"no C++ compiler: none of {', '.join(wanted)} is on PATH")


def compiled(source, name="kernel", directory=None):
    """Return the compiled `source` as a ctypes.CDLL; its file begins with `name`. CannotCompile says what went wrong.
    """
    found, directory = compiler(), Path(directory or cache_directory())
    library = directory / f"{name}-{_key(source, found)}.so"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(os.stat(directory)):
            raise CannotCompile(f"{directory} is another user's, or others can write to it: make it your own alone "
                                "(chown, chmod go-w), or set XDG_CACHE_HOME to a directory that is")
        if not _is_whole(library):
            _compile(found, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotCompile(f"{library} cannot be written or read ({error}): set XDG_CACHE_HOME to a directory that "
                            "can") from error


def _compile(found, source, library):
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        try:
            done = subprocess.run([found, *FLAGS, str(source), "-o", str(made)], capture_output=True, text=True,
                                  timeout=SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as error:
            raise CannotCompile(f"{found} took more than {SECONDS} s for {source.name}") from error
        if done.returncode:
            raise CannotCompile(f"{found} fails on {source.name}: {done.stderr.strip()[-500:]}")
        made.chmod(0o700)
        _beside(made).write_bytes(_description(made.read_bytes()))
        for path in (made, _beside(made)):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # on the disk before it gets its name: else a crash leaves half a file
            # at once: another rank sees the old one or the whole new one
            os.replace(path, library.with_name(path.name))


def _is_own(status):
    """Tell whether a file, by its os.stat_result, is this user's and nobody else can write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(library):
    """Tell whether the file is there as it was compiled, and this user's own."""
    try:
        said, status, content = _beside(library).read_bytes(), os.lstat(library), library.read_bytes()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_own(status) and said == _description(content)


def _beside(library):
    return library.with_suffix(".sha256")


def _description(content):
    return f"{len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}\n".encode()


def _key(source, found):
    status = os.stat(found)
    said = [Path(source).read_text(), *FLAGS, os.path.realpath(found), str((status.st_size, status.st_mtime_ns)),
            platform.machine(), _features()]  # -march=native: another processor may lack an instruction
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:20]


def _features():
    """Return the line of the processor's features, "" where there is none to read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
