"""Builds the device for the torch that is installed: one library with all that torch imports of CUDA's libraries.

torch is linked against libcudart.so.13, libcublas.so.13 and a dozen more. What it imports of them is read off its own
libraries. device/*.c define what needs an answer; of the rest each function is one line here, which returns success
where it only computes, and an error of its library elsewhere. For each name that torch is linked against there is an
empty library that needs ours, so that NVIDIA's are neither needed nor loaded.

The result stays in the user's cache directory, under a name that has a hash of the sources, torch and the compiler.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = sorted((Path(__file__).parent / "device").glob("*.[ch]"))
FLAGS = ("-O2", "-fPIC", "-std=gnu11", "-fvisibility=hidden")
SECONDS = 300  # for the compiler
CUDA_S = re.compile(r"cu[A-Z]|cuda[A-Z]|__cuda|cublas|cudnn|cusolver|cusparse|cufft|curand|nccl|nvrtc|nvml|cupti"
                    r"|nvshmem|cuFile|nvtx|nvJit")
LIBRARY = re.compile(r"lib(cu[dbsfr]|cuda|nccl|nvrtc|nvshmem|cupti|nvJit|nvTool|cufile)")
COMPUTES = re.compile(r"cublas(Lt)?(Set|Matmul|Matrix)|cublas.*(gemm|gemv|dot|trsm|getr|geqr|gels)|nccl"
                      r"|cufft(Set|Exec|Xt)", re.IGNORECASE)
REFUSED = {"cupti": 15, "cudnn": 3000, "cusolver": 7, "cusparse": 10, "cufft": 16, "nvshmem": 1, "nvml": 3, "cu": 801}


class CannotBuild(RuntimeError):
    """Says why there is no device, in one sentence."""


def build(torch, version):
    """Return the folder of the libraries for the package `torch` (a folder), built now or before. CannotBuild says why
    not."""
    if (found := shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")) is None:
        raise CannotBuild("no C compiler is on PATH: install gcc (apt install gcc, or conda install gcc), or set CC")
    cache = _cache()
    said = [version, *map(str, (torch, os.path.realpath(found), os.stat(found).st_mtime_ns)), *FLAGS,
            *(path.read_text() for path in (*SOURCES, Path(__file__)))]
    folder = cache / f"phantom-{hashlib.sha256(chr(0).join(said).encode()).hexdigest()[:20]}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _make(found, Path(torch) / "lib", Path(made))
                _keep(Path(made), folder)
        _check(folder)
    except OSError as error:
        raise CannotBuild(f"{cache} cannot be written or read ({error}): set XDG_CACHE_HOME to a directory that can") \
            from error
    return folder


def _cache():
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(said) if os.path.isabs(said) else Path.home() / ".cache") / "refimpl"
    except RuntimeError as error:
        raise CannotBuild("there is no home directory to keep the device in: set XDG_CACHE_HOME to an absolute path, "
                          "to a directory of your own") from error


def _make(cc, libraries, out):
    imported, needed = imports(libraries)
    objects = []
    for source in (path for path in SOURCES if path.suffix == ".c"):
        objects.append(out / f"{source.stem}.o")
        _run(cc, "-c", *FLAGS, str(source), "-o", str(objects[-1]))
    said = _run("nm", "--defined-only", "-g", *map(str, objects))
    defined = {line.split()[-1] for line in said.splitlines() if " " in line}
    rest = out / "rest.c"
    rest.write_text("".join(f"int {name}() {{ return {answer(name)}; }}\n" for name in sorted(imported - defined)))
    _run(cc, "-shared", "-O2", "-fPIC", "-w", "-fno-builtin", "-Wl,-soname,libphantom.so", *map(str, objects),
         str(rest), "-o", str(out / "libphantom.so"), "-lpthread", "-ldl")
    for name in sorted(needed):
        _run(cc, "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", os.devnull, "-o", str(out / name),
             f"-L{out}", "-Wl,--no-as-needed,-rpath,$ORIGIN", "-lphantom")
    for path in (*objects, rest):
        path.unlink()


def imports(libraries):
    """Return (functions, names of libraries) that torch's libraries in a folder import of CUDA's."""
    functions, needed = set(), {"libcuda.so.1", "libnvidia-ml.so.1"}  # these two it opens by name
    for library in sorted(Path(libraries).glob("lib*.so")):
        names = (line.split()[-1].partition("@")[0] for line in
                 _run("nm", "-D", "--undefined-only", str(library)).splitlines())
        functions |= {name for name in names if CUDA_S.match(name)}
        needed |= {name for name in re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(library)))
                   if LIBRARY.match(name)}
    by_name = (Path(libraries) / "libc10_cuda.so").read_bytes()
    functions |= {name.decode() for name in re.findall(rb"\0(nvml[A-Z]\w+)(?=\0)", by_name)}
    if "libcudart.so.13" not in needed:
        raise CannotBuild(f"torch in {Path(libraries).parent} is linked against {', '.join(sorted(needed)[:3])} and no "
                          "libcudart.so.13: the device knows PyTorch's own builds for CUDA 13 (pip install torch)")
    return functions, needed


def answer(name):
    """Return what a function returns that does nothing: 0 if it only computes, else its library's "not supported"."""
    return 0 if COMPUTES.match(name) else next(status for start, status in (*REFUSED.items(), ("", 1))
                                               if name.startswith(start))


def _keep(made, folder):
    """Move a finished folder to its place, once all of it is on the disk, with a hash of each file."""
    files = sorted(made.iterdir())
    (made / "files").write_text("".join(f"{_hash(path)} {path.name}\n" for path in files))
    for path in (*files, made / "files"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    whole = Path(tempfile.mkdtemp(dir=folder.parent))
    for path in (*files, made / "files"):
        path.rename(whole / path.name)
    try:
        whole.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(whole)
        if not folder.exists():
            raise


def _check(folder):
    """Raise CannotBuild if the libraries are another user's, if others can write there, or if they are not as they were
    built: they are about to be loaded."""
    status = os.stat(folder)
    if status.st_uid != os.getuid():
        raise CannotBuild(f"{folder} belongs to another user: set XDG_CACHE_HOME to a directory of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotBuild(f"others than you can write to {folder}: delete it")
    for line in (folder / "files").read_text().splitlines():
        expected, _, name = line.partition(" ")
        if _hash(folder / name) != expected:
            raise CannotBuild(f"{folder / name} is not as it was built: delete {folder}")


def _hash(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise CannotBuild(f"no {command[0]} is on PATH: it comes with a C compiler (apt install gcc)") from error
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {SECONDS} s") from error
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:2])} fails: {done.stderr.strip()[-500:]}")
    return done.stdout
