"""A pipeline schedule as data: for each rank the list of what it computes, in order.

A stage is a run of consecutive layers; a rank has one stage, or several. Stage 0 takes the model's input, the last one
returns the loss. A schedule names neither messages nor tensors: what a rank receives before an instruction and sends
after it follows from where the neighbouring stages are.
"""

from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "FULL", "B", "W"


class Instruction(NamedTuple):
    """Names one computation of one stage on one micro-batch.

    `kind`: "F" the forward; "B" the gradient of the stage's input alone; "W" the gradients of its weights alone, any
    time after its B; "FULL" both at once.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Says what each rank computes, in order.

    - `ranks[r]`: the Instructions of rank r, as a tuple.
    - `rank_of[s]`: the rank that has stage s.
    - `micro_batches`: how many a step has, m.
    """

    name: str
    ranks: tuple[tuple[Instruction, ...], ...]
    rank_of: tuple[int, ...]
    micro_batches: int

    @property
    def stages(self) -> int:
        """Return how many stages the model is split in: ranks × chunks of a rank."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)
