"""ZeRO: data parallelism whose model states are sharded over the ranks, one kind of state after the other.

    def train(comm):                                             # in each rank
        engine = Zero2(model, comm, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        for tokens in this_ranks_part_of_each_batch:
            loss = engine(tokens, tokens)                        # the model's own forward
            engine.backward(loss)                                # in place of loss.backward()
            engine.step()                                        # drops the gradients, too: no zero_grad
        engine.save("saved")                                     # any stage, on any number of ranks, can load it

    refimpl.comm.launch(train, 2)                                # starts two ranks; under torchrun it takes those

The four classes are used alike; each docstring says what its class adds. `engine.model` is your model, for `train()`
and `eval()`. Buckets should be small beside the model (`bucket_bytes`, by default a sixteenth of the gradients): until
a bucket is full, stage 2 holds its whole gradients.

Order of reading: `papers/zero` (the idea in one screen), then `bucket` (parameters side by side), `engine` (what a step
is), `reducer` (gradients on their way) and `data_parallel` (averaged whole), `zero1` with `update` (the optimizer on
shards), `zero2` (gradients in shards), `zero3` (parameters in shards) with `sharded_parameters`, `units` (which modules
go together), `gathering` (which are whole at the moment), `hybrid` (states cut among the ranks of one
machine alone), `closed_forms` (bytes and traffic of all of them).

Seams: an engine is `forward`, `backward(output, gradient=None)`, `step`, `no_sync` and `shards()`. `store` says where
shards stay and `update` where they are updated, for offload; `world` has the other ranks that hold parts of the model,
for tensor and pipeline parallelism; `shards` and `replicas` are two levels of data parallelism, as a mesh has them.
Machinery is one level down, in `internals`.
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from ..saving import SavedStateError
    from .data_parallel import DataParallel
    from .zero1 import Zero1
    from .zero2 import Zero2
    from .zero3 import Zero3

__getattr__, __dir__ = lazily(__name__, {"..saving": "SavedStateError", ".data_parallel": "DataParallel",
                                         ".zero1": "Zero1", ".zero2": "Zero2", ".zero3": "Zero3"})
__all__ = ["DataParallel", "SavedStateError", "Zero1", "Zero2", "Zero3"]
