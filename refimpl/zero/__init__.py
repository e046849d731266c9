"""ZeRO: data parallelism whose model states are shared out over the ranks, one kind of state after the other.

    def train(comm):                                             # in each rank
        engine = Zero2(model, comm, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        for tokens in this_ranks_part_of_each_batch:
            loss = engine(tokens, tokens)                        # the model's own forward
            engine.backward(loss)                                # in place of loss.backward()
            engine.step()                                        # gradients are gone after it: no zero_grad
        engine.save("checkpoint")                                # any stage, on any number of ranks, can load it

    refimpl.comm.launch(train, 2)                                # starts two ranks; under torchrun it takes those

The four classes are used alike; each says what it takes. `engine.model` is yours, for `train()` and `eval()`. Buckets
should be small beside the model (`bucket_bytes`, by default 25 MiB of gradients): until a bucket is full, stage 2 holds
whole gradients of it. `zero.timeline` draws what overlaps with what, `zero.closed_forms` predicts the bytes.
"""

from .data_parallel import DataParallel
from .manifest import CheckpointError
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

__all__ = ["CheckpointError", "DataParallel", "Zero1", "Zero2", "Zero3"]
