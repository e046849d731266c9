"""A CUDA device that has memory and computes nothing: PyTorch's own allocator on a machine without a GPU.

    from refimpl import phantom
    phantom.start(memory=80 * 2**30)  # before torch
    import torch
    torch.empty(2**30, device="cuda"), torch.cuda.max_memory_allocated()

torch.cuda and every branch for CUDA run, on libraries of ours in place of NVIDIA's (device/*.c). Allocated, reserved,
snapshots and out-of-memory errors are PyTorch's, to the byte. Kernels are not run: a tensor holds whatever lay there,
zeros at first, and what has its size by numbers (`nonzero`) has any size, so `rehearse` refuses that. It cannot tell
time, what cuDNN or NCCL take for themselves, or a real driver's addresses; cuSOLVER and cuFFT are not there.

It is never on by itself. `start` turns it on for this process and for those that it starts.
"""

import ast
import ctypes
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

from .libraries import CannotBuild, build
from .status import VARIABLE, environment_without, libphantom, pretending, running, words

__all__ = ["CannotBuild", "environment_without", "libphantom", "load", "pretending", "running", "start", "words"]
CHILDREN = str(Path(__file__).with_name("children"))
MAJOR = "13"  # of CUDA


def start(memory: int, devices: int = 1, *, numbers: bool = False, capability: tuple[int, int] = (9, 0),
          processors: int = 132, context: int = 0, name: str = "Phantom") -> None:
    """Make `devices` CUDA devices of `memory` bytes each, in this process and those that it starts.

    - `numbers`: compute each operation's values on the CPU as well (numbers.py): slow, for small tensors.
    - `capability`, `processors`, `name`: what PyTorch asks a device for; it chooses kernels by the first two.
    - `context`: bytes of a device that are taken before PyTorch takes any.

    Raises ValueError for a number that cannot be, and CannotBuild, in one sentence, if there is a GPU here, if torch is
    imported already or is not PyTorch's build for CUDA 13, or without a C compiler.
    """
    _check_numbers(memory, devices, capability, processors, context)
    options = {"MEMORY": memory, "DEVICES": devices, "MAJOR": capability[0], "MINOR": capability[1],
               "PROCESSORS": processors, "CONTEXT": context, "NAME": name, "NUMBERS": "1" if numbers else ""}
    options = {f"{VARIABLE}_{key}": str(value) for key, value in options.items()}
    if running():
        if any(os.environ.get(key) != value for key, value in options.items()):
            raise CannotBuild("a device without kernels is on already, with other numbers: it is made once a process")
        return
    folder = build(*_torch())
    paths = [CHILDREN, *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    os.environ.update(options, **{VARIABLE: str(folder), "TRITON_LIBCUDA_PATH": str(folder),
                                  "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    load()


def load() -> None:
    """Load the device that this process's environment names: `start` does, and each process that it starts, as early
    as Python looks for sitecustomize."""
    folder = Path(os.environ[VARIABLE])
    names = [line.split()[1] for line in (folder / "files").read_text().splitlines()]
    for each in sorted(names, key=lambda name: name != "libphantom.so"):  # the others need it
        ctypes.CDLL(str(folder / each), ctypes.RTLD_GLOBAL)
    if os.environ.get(f"{VARIABLE}_NUMBERS"):
        sys.meta_path.insert(0, _NumbersAfterTorch())


class _NumbersAfterTorch:
    """Turns numbers on as soon as torch is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_turn_on(module):
            run(module)
            importlib.import_module(".numbers", __name__)  # which turns itself on

        spec.loader.exec_module = run_and_turn_on
        return spec


def _check_numbers(memory, devices, capability, processors, context):
    for what, value, least in (("memory", memory, 1), ("devices", devices, 1), ("processors", processors, 1),
                               ("context", context, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{what}={value!r}: expected a whole number, at least {least}")
    if devices > 64:
        raise ValueError(f"devices={devices}: expected at most 64")
    if memory > 2**40:
        raise ValueError(f"memory={memory:,} bytes: expected at most {2**40:,}, 1 TiB")
    if context >= memory:
        raise ValueError(f"memory={memory:,} bytes and context={context:,}: nothing is left for PyTorch")
    if len(capability) != 2 or not all(isinstance(part, int) and part >= 0 for part in capability):
        raise ValueError(f"capability={capability!r}: expected two whole numbers, as (9, 0)")


def _torch():
    """Return (folder, version) of the installed torch, and do not import it. CannotBuild if the device does not fit."""
    if "torch" in sys.modules:
        raise CannotBuild("torch is imported already: call phantom.start before the first import of torch")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise CannotBuild(f"the device is for Linux on x86-64 and Arm, this is {sys.platform} on {platform.machine()}")
    if os.path.exists("/dev/nvidia0") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise CannotBuild("there is a GPU in this machine: use it, or hide it with CUDA_VISIBLE_DEVICES= (empty)")
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild("torch is not installed: pip install torch gives PyTorch's build for CUDA on Linux")
    folder = Path(spec.submodule_search_locations[0])
    said = (folder / "version.py").read_text()
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *(.+)$", said, re.MULTILINE))
    version, cuda = (ast.literal_eval(found.get(key, "None")) for key in ("__version__", "cuda"))
    if cuda is None:
        raise CannotBuild(f"torch {version} is not a build for CUDA: the device needs what pip install torch gives on "
                          "Linux (pip install --index-url https://pypi.org/simple torch)")
    if cuda.partition(".")[0] != MAJOR:
        raise CannotBuild(f"torch {version} was built for CUDA {cuda}: the device knows CUDA {MAJOR}")
    return str(folder), version
