"""Host offload of what autograd saves: on the device during its forward and its backward, in host memory between.

    forward    each storage is copied to pinned host memory on a stream of its own while the computation goes on; its
               device memory is free when the copy is done, at most `depth` storages later
    backward   storages come back in reverse order, `depth` of them ahead of the one that is used

The device holds no activations between forward and backward but what is small. Gradients are bit for bit those without
it. "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design" (Rhu et al. 2016)
has the idea, for feature maps.
"""

from typing import TYPE_CHECKING, Any

from .saved_tensors import SavedStorages
from .transfer.copy_order import TransferSchedule
from .transfer.streams import CUDATransfer

if TYPE_CHECKING:
    import torch

SMALLEST = 2**20  # bytes: 1 MiB takes some 40 µs at 25 GB/s, about as long as the kernels around it
HOST = "in host memory"


def offload_activations(model: "torch.nn.Module", *, depth: int = 2, smallest: int = SMALLEST, only: Any = None,
                        transfer: Any = None) -> Any:
    """Keep activations in host memory until backward: `with offload_activations(model) as c: loss = model(x)`.

    No-op on a CPU: tensors in host memory remain where they are. `offloaded_activation_bytes` predicts the bytes;
    `c.report` tells which storages were copied and which stayed, and `c.report.host` the bytes that were copied.

    - `depth`: how many storages may be on their way out at once, and how many are fetched ahead: device memory for
      time. With 0 the computation waits for each copy, and the device holds what it does with PyTorch's `save_on_cpu`.
    - `smallest`: storages of fewer bytes stay. `only`: patterns of module names, e.g. `"blocks.*"`; None: all.
    - `transfer`: the object that makes the copies, with the methods of `Rehearsal`. Default: CUDA's, pinned memory.

    What is changed in place while it is being copied is refused in backward, as PyTorch does without hooks.

    Raises ValueError for a depth below 0, a threshold below 0 and a pattern that no module has; TypeError for a model
    that is no module and a transfer without its methods; RuntimeError when entered twice at once.
    """
    return OffloadActivations(model, depth, smallest, only, transfer)


class OffloadActivations(SavedStorages):
    """See `offload_activations`."""

    def __init__(self, model, depth, smallest, only, transfer):
        super().__init__(model, smallest, only)
        if type(depth) is not int or depth < 0:
            raise ValueError(f"depth={depth!r}: expected an integer of at least 0, the storages copied at once")
        for name in ("offloads", "to_host", "to_device", "wait"):
            if transfer is not None and not callable(getattr(transfer, name, None)):
                raise TypeError(f"transfer={transfer!r} has no method {name}: expected an object that makes the "
                                "copies, such as Rehearsal(); leave it out for CUDA's")
        self.depth, self._transfer = depth, transfer or CUDATransfer()

    def __enter__(self):
        super().__enter__()
        self._schedule = TransferSchedule(self._transfer, self.depth)
        return self

    def __exit__(self, *exception):
        try:
            super().__exit__(*exception)
        finally:
            self._schedule.wait()  # what is on its way out is free when the region ends

    def refuse(self, tensor):
        """Refuse what is in host memory already."""
        return None if self._transfer.offloads(tensor) else "left: in host memory already"

    def store(self, flat, tensor):
        """Start the copy to the host."""
        stored = self._schedule.send(flat, tensor)
        self.report.host += stored.nbytes
        return HOST, 0, stored
