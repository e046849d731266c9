"""Random numbers on the ranks of a tensor-parallel group: the same outside the split part, others within.

Outside, all ranks compute the same, so dropout has to draw the same. Within, each has heads (or tokens) of its own, and
equal masks on all of them would be dropout of the same places. So where the split part begins, every rank draws one
number from the common stream, and goes on with a stream of its own that begins at (this number, rank). Where it ends,
the common stream continues. A recomputation that restores the common stream restores those within, too.
"""

import torch

BEGINS = 2**62  # numbers to begin a stream with are below
STEP = 0x9E3779B97F4A7C15  # spreads ranks over them: 2⁶⁴ / golden ratio


class OwnRandom:
    """Switches this rank between the common stream of random numbers and its own, on the CPU and on its GPU."""

    def __init__(self, comm):
        self.comm, self.common = comm, None

    @torch._disable_dynamo
    def begin(self):
        """Switch to this rank's own stream, until `end`. Does nothing if the rank is on it already."""
        # Fake tensors have no number to draw.
        if self.common is not None or torch._guards.active_fake_mode() is not None:
            return
        begin = int(torch.randint(BEGINS, ()))
        cuda = self.comm.device.type == "cuda"
        self.common = torch.get_rng_state(), torch.cuda.get_rng_state(self.comm.device) if cuda else None
        seed = (begin + STEP * (self.comm.rank + 1)) % 2**63
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs, too
        if cuda:
            with torch.cuda.device(self.comm.device):
                torch.cuda.manual_seed(seed)

    @torch._disable_dynamo
    def end(self):
        """Switch back to the common stream. Does nothing if the rank is on it already."""
        if self.common is None:
            return
        (cpu, cuda), self.common = self.common, None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.comm.device)
