"""A rehearsal from Python: a process of its own for one GPU of the catalog, and what came of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import catalog, phantom

if TYPE_CHECKING:
    from os import PathLike


class CannotRehearse(RuntimeError):
    """Says why there is no device to rehearse on, in one sentence."""


def rehearse(script: "str | PathLike[str]", arguments: Sequence[str] = (), *, on: str = "h100", gpus: int = 1,
             world: int | None = None, rank: int = 0, budget: Any = None, steps: int = 2, numbers: bool = False,
             snapshot: Any = None, module: bool = False, stdout: Any = None) -> dict[str, Any]:
    """Run `script`, a file or with `module` the name of a module, for some steps on PyTorch's own allocator, and return
    what came of it.

    - `on`: a GPU of the catalog, of which the script sees `gpus`; or what `device` returns.
    - `world`, `rank`: be one of that many ranks, as under torchrun; the others are not there.
    - `budget`: bytes of a GPU, instead of the catalog's. `steps`: of its optimizers, then it ends.
    - `numbers`: compute values on the CPU. `snapshot`: a file for PyTorch's recording of the GPU's memory.
    - `stdout`: where the script prints.

    The dict has "steps" (a reading each: "allocated", "requested" and "reserved", the peaks in bytes of the GPU with
    most, and "now"), "out of memory" (None, or its "message", "line" and "step"), "ending", "status" (the script's own)
    and "words" (whose bytes they are). CannotRehearse if there can be no device, ValueError for a GPU that the catalog
    has not.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {"device": device(on, gpus, budget) if isinstance(on, str) else on, "steps": steps, "world": world,
                   "rank": rank, "numbers": numbers, "module": module, "result": str(result),
                   "snapshot": snapshot and os.path.abspath(snapshot)}
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        command = [sys.executable, "-m", "refimpl.rehearse.child", json.dumps(options), str(script), *arguments]
        # a process of its own: the device has to come before torch
        done = subprocess.run(command, stdout=stdout, env=phantom.environment_without() | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths))})
        found = json.loads(result.read_text()) if result.exists() else {
            "cannot": f"the script ended its process itself, with status {done.returncode}, before there was a reading"}
    if "cannot" in found:
        raise CannotRehearse(found["cannot"])
    return found


def device(name, gpus=1, budget=None):
    """Return what phantom.start takes for a GPU of the catalog. ValueError if there is none, or it is not NVIDIA's."""
    gpu = catalog.hardware(name.strip())
    if gpu.capability is None:
        raise ValueError(f"{name} is no GPU of NVIDIA's: PyTorch's allocator for CUDA does not run on it")
    return {"memory": budget or gpu.cuda_bytes, "devices": gpus, "capability": list(gpu.capability),
            "processors": gpu.processors, "context": gpu.context_bytes, "name": f"{gpu.name} (computes nothing)"}
