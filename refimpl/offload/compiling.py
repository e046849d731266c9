"""Compiles the C++ kernel once, and keeps what was compiled in the user's cache directory.

The name of the file has a hash of the source, the compiler, its flags and the processor's features, so another machine
that shares the directory makes its own. It is written beside its place and moved there: ranks that compile it at the
same time get whole files, and the last one stays.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # for the compiler


class CannotCompile(RuntimeError):
    """Says why there is no compiled kernel."""


def cache_directory():
    """Return where compiled kernels stay: $XDG_CACHE_HOME/refimpl, by default ~/.cache/refimpl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refimpl"


def compiler():
    """Return the path of a C++ compiler: $CXX, or the first of c++, g++ and clang++. CannotCompile without one."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise CannotCompile(f"no C++ compiler: none of {', '.join(wanted)} is on PATH")


def compiled(source=SOURCE, directory=None):
    """Return the compiled `source` as a ctypes.CDLL. CannotCompile says what went wrong."""
    found, directory = compiler(), Path(directory or cache_directory())
    library = directory / f"adamw-{_key(source, found)}.so"
    try:
        if not library.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile(found, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotCompile(f"{library} cannot be written or read ({error}): set XDG_CACHE_HOME to a directory that "
                            "can") from error


def _compile(found, source, library):
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run([found, *FLAGS, str(source), "-o", name], capture_output=True, text=True,
                              timeout=SECONDS, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise CannotCompile(f"{found} fails on {source.name}: {done.stderr.strip()[-500:]}")
        os.replace(name, library)
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{found} took more than {SECONDS} s for {source.name}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _key(source, found):
    stat = os.stat(found)
    said = [Path(source).read_text(), *FLAGS, os.path.realpath(found), str((stat.st_size, stat.st_mtime_ns)),
            platform.machine(), _features()]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:20]


def _features():
    """Return the line of the processor's features, "" where there is none to read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
