"""What PyTorch's allocator would reserve for a run: a replay of all that the run asks for, workspaces among it."""

from bisect import bisect_right

import torch

from ..allocator import AllocationTrace, Settings, replay
from ..memory.storage_records import BACKWARD, StorageRecord
from ..memory.tracking.taking import WORKSPACE
from ..versions import minor_of

ENDLESS = 2**50  # bytes of a device on which everything fits
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_addmm_activation", "_grouped_mm"}


def reserved(trace, gpu):
    """Return the bytes that PyTorch's allocator reserves for the whole `trace`, on `gpu` (a Hardware; None: without
    cuBLAS's workspaces)."""
    if gpu is not None:
        for nbytes, at in _workspaces(trace, gpu):
            _insert(trace, nbytes, at)
    version = ".".join(map(str, minor_of(torch.__version__)))
    return replay(AllocationTrace.of(trace), capacity=ENDLESS, settings=Settings(version=version)).peak


def cublas_workspace(gpu):
    """Return the bytes of a workspace of cuBLAS, which PyTorch takes at a thread's first matrix product and keeps."""
    newest = (9,) if minor_of(torch.__version__) < (2, 13) else (9, 10, 11, 12)
    return 32 * 2**20 if gpu.capability[0] in newest else (2 * 4096 + 8 * 16) * 1024


def _workspaces(trace, gpu):
    """Yield (bytes, index of an operation): of the thread that calls the model, and of autograd's."""
    kinds = [(MATRIX_PRODUCTS, cublas_workspace(gpu))]
    if minor_of(torch.__version__) < (2, 12):
        kinds.append(({"addmm"}, 2**20))  # cuBLASLt has its own
    for names, nbytes in kinds:
        for in_backward in (False, True):
            at = next((i for i, op in enumerate(trace.ops)
                       if op.name in names and (op.phase == BACKWARD) is in_backward), None)
            if at is not None:
                yield nbytes, at


def _insert(trace, nbytes, at):
    """Add a storage that is taken at operation `at`, after its results, and stays."""
    op = trace.ops[at]
    trace.records.append(StorageRecord(trace.device, op.name, op.phase, op.module, at, nbytes, mark=WORKSPACE))
    place = bisect_right(trace.events, at, key=lambda event: event[0])
    trace.events.insert(place, (at, len(trace.records) - 1, nbytes))
