"""What the compiler makes of a Triton kernel, for a GPU that need not be in this machine.

Triton translates Python to PTX. Its ptxas translates PTX to the GPU's own instructions (SASS). Both run without a GPU
and without its driver. ptxas reports the resources of a kernel: the registers of a thread, and the bytes that did not
fit into registers and go to memory and back at each use (spills). The instructions show which units do the work:

    HGMMA     a matrix product of a warp group (128 threads) on the tensor cores, from shared memory: PTX's wgmma, sm_90
    HMMA      a matrix product of one warp, as GPUs before sm_90 have it; on sm_90 it stays far below HGMMA's rate
              ("Dissecting the NVIDIA Hopper Architecture through Microbenchmarking …", Luo et al. 2024)
    UTMALDG   a whole tile fetched by the tensor memory accelerator (TMA); UTMASTG stores one
    LDGSTS    16 bytes a thread copied to shared memory in the background: PTX's cp.async
    LDG, STG  loads and stores through registers;  LDL, STL: the same for spills

None of this tells how fast a kernel is. It tells when a kernel cannot be fast: spills in the loop, HMMA in place of
HGMMA, products that wait for one another (ptxas' remarks C7500 and up), or more shared memory than the GPU has.
"""

import collections
import contextlib
import inspect
import io
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import ASTSource

# Bytes of shared memory that one program can have: CUDA C++ Programming Guide, technical specifications per capability.
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    """Holds what ptxas and the disassembler report about one kernel."""

    name: str
    warps: int  # of a program: more than num_warps if the compiler specialised warps
    registers: int  # of a thread, when the kernel starts; specialised warps trade theirs afterwards
    spill_bytes: int  # of a thread: stores and loads
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a program: dynamic and static
    shared_limit: int
    ttgir: str  # Triton's last intermediate form of the kernel that has tiles
    cubin: bytes  # what a GPU loads
    capability: int  # of that GPU
    warnings: tuple  # lines of ptxas: its warnings, and remarks with a number such as (C7510)
    seconds: float
    # From the disassembler (see `sass`), which takes many kernels at once:
    instructions: collections.Counter = collections.Counter()  # name → how many are in the code; 0 for one that is not
    sass: str = ""  # the GPU's own instructions

    def faults(self):
        """Return the reasons why this kernel cannot be fast or cannot start, as a list of sentences."""
        found = [f"{self.name}: {line}" for line in self.warnings]
        if self.spill_bytes:
            found.append(f"{self.name} spills {self.spill_bytes} bytes with {self.registers} registers: smaller tiles, "
                         "or more warps to share them")
        if self.shared_bytes > self.shared_limit:
            found.append(f"{self.name} needs {self.shared_bytes} bytes of shared memory, there are "
                         f"{self.shared_limit}: smaller tiles, or fewer stages")
        return found


class Case(NamedTuple):
    """Holds a kernel and the arguments and options to compile it with, as `compile_kernel` takes them."""

    kernel: str  # "package.module:name", so that another process can import it
    arguments: dict
    num_warps: int
    num_stages: int
    options: dict = {}

    @classmethod
    def of(cls, launch, target=("cuda", 90)):
        """Make the Case of a `Launch`, whose tensors may be on the "meta" device, for a target."""
        function = launch.kernel.fn
        constant = {name for name, parameter in inspect.signature(function).parameters.items()
                    if parameter.annotation is triton.language.constexpr}
        arguments = {name: value if name in constant else as_launched(value)
                     for name, value in launch.arguments.items()}
        return cls(f"{function.__module__}:{function.__name__}", arguments, launch.config.num_warps,
                   launch.config.num_stages, {"target": target})


def compile_kernel(kernel, arguments, *, num_warps, num_stages, target=("cuda", 90), **options):
    """Compile `kernel`, a function under triton.jit or gluon.jit, and return its Compiled, not disassembled yet.

    - `arguments`: name → type or value. A type is "*bf16", "fp32", "i32" or "i64", for example. With ":16" appended
      ("*bf16:16") the pointer or number is a multiple of 16; a launch detects that, and the compiler makes use of it.
      A value is given for a tl.constexpr, and for an argument that a launch makes constant (the int 1, None). A
      NamedTuple argument is a NamedTuple of these. `as_launched` makes any of them from the actual argument.
    - `num_warps`, `num_stages` and `options` (maxnreg, …): as in a launch.
    - `target`: (backend, capability).

    Triton's cache is neither read nor written. Raises TypeError for an option that Triton does not know, ValueError if
    the arguments do not fit the kernel, RuntimeError in a process that interprets kernels, and whatever Triton raises
    for code that it cannot compile.
    """
    if target[0] != "cuda" or target[1] not in SHARED_BYTES:
        raise ValueError(f"target={target!r}: expected ('cuda', capability) with one of {sorted(SHARED_BYTES)}")
    if unknown := set(options) - set(CUDAOptions.__dataclass_fields__):  # Triton itself would ignore them
        raise TypeError(f"compile_kernel({', '.join(sorted(unknown))}=…): expected options that Triton knows, "
                        f"{sorted(CUDAOptions.__dataclass_fields__)}")
    source = _source(kernel, arguments)
    start, log = time.perf_counter(), io.StringIO()
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = cache
        triton.knobs.nvidia.dump_ptxas_log = True  # Triton runs `ptxas -v` and prints what it says
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget(*target, 32),
                                      options={"num_warps": num_warps, "num_stages": num_stages, **options})
    log, meta = log.getvalue(), compiled.metadata
    return Compiled(meta.name, meta.num_warps, max(_numbers(r"Used (\d+) registers", log)),
                    sum(_numbers(r"(\d+) bytes spill", log)), sum(_numbers(r"(\d+) bytes stack frame", log)),
                    meta.shared + sum(_numbers(r"(\d+) bytes smem", log)), SHARED_BYTES[target[1]],
                    compiled.asm["ttgir"], compiled.asm["cubin"], target[1],
                    tuple(line for line in log.splitlines() if re.search(r"warning|\(C\d+\)", line)),
                    time.perf_counter() - start)


def as_launched(value, specialize=True):
    """Return what the compiler knows about an argument of a launch.

    That is its type, and whether a pointer or an int is a multiple of 16. The int 1 becomes a constant. Without
    `specialize` (for names in the kernel's do_not_specialize) it is the type alone. A tensor on the "meta" device
    counts as aligned.
    """
    if isinstance(value, torch.Tensor):
        return f"*{_SHORT[value.dtype]}" + ":16" * (specialize and value.data_ptr() % 16 == 0)
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, tuple):
        return type(value)(*map(as_launched, value))
    if value is None or isinstance(value, bool) or (specialize and value == 1):
        return value
    return ("i32" if -2**31 <= value < 2**31 else "i64") + ":16" * (specialize and value % 16 == 0)


_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
          torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1"}


def _source(kernel, arguments):
    """Return Triton's own description of a kernel and its arguments."""
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError(f"{kernel!r} is a {type(kernel).__name__}: expected a function under triton.jit in a "
                           "process without TRITON_INTERPRET=1, where kernels are interpreted and never compiled; "
                           "start another process without that variable")
    if set(arguments) != set(kernel.arg_names):
        raise ValueError(f"arguments missing {sorted(set(kernel.arg_names) - set(arguments))}, unknown "
                         f"{sorted(set(arguments) - set(kernel.arg_names))}: give each of {kernel.arg_names}")
    signature, constants, attributes = {}, {}, {}

    def describe(path, name, value, constant=False):
        """Return the type of one argument, or of each part of one; `path` is how Triton numbers it."""
        if isinstance(value, tuple) and not constant:
            return type(value)(*(describe((*path, j), name, part) for j, part in enumerate(value)))
        if constant or not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        kind, _, multiple = value.partition(":")
        if multiple not in ("", "16"):
            raise ValueError(f"{name}={value!r}: expected a type such as '*bf16' or '*bf16:16'; a launch knows of "
                             "multiples of 16 only")
        if multiple:
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for i, parameter in enumerate(kernel.params):
        signature[parameter.name] = describe((i,), parameter.name, arguments[parameter.name], parameter.is_constexpr)
    make = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    return make(kernel, signature, constants, attributes)


def _numbers(pattern, log):
    return [int(number) for number in re.findall(pattern, log)]
