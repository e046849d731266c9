"""What an engine hands over to be saved or loaded: its shards, its optimizer, and how to load one group of them."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import Communicator
from ..sharding import Shard, names_of, overlaps, spec_of
from .dtype_names import part_name


@dataclass(eq=False)
class TrainingState:
    """Describes what one rank holds of a model in training. Nobody needs to know how the model was cut.

    - `comm`: of all ranks that hold a part of the model.
    - `shards`: of this rank, group by group. Several of one name are different parts of that tensor. Ranks that share
      tensors have their groups in one order. Each tensor is in some rank's shards, also one without elements.
    - `optimizer`: of this rank's `own` tensors.
    - `groups`: [names of the whole parameters] of each param group, also of those that this rank has no part of.
    - `model`: which names a tensor has in its state_dict, and which buffers are in it at all.
    - `step`: how many steps were made. `about`: further words for the manifest, such as {"stage": 1}.
    - `own`: {name: tensor} that belongs to this rank alone, as what it has not sent of compressed gradients; `take`
      gets them when they are loaded, on as many ranks. about["own"] says what they are. `own` is None if those that
      were saved are to be left.
    - `loaded(group)`: a context in which the tensors of that group have their contents; outside of it a store may keep
      them elsewhere, but for single numbers of the optimizer's state. No two groups are ever loaded at a time.
    """

    comm: Communicator
    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    groups: list[list[str]]
    model: torch.nn.Module
    step: int = 0
    about: dict = field(default_factory=dict)
    loaded: Callable = contextlib.nullcontext
    own: dict | None = field(default_factory=dict)
    take: Callable | None = None

    def __post_init__(self):
        self.names = _names(self.model)
        kept = set(self.names.values())  # buffers with persistent=False are in no state_dict
        self.shards = [shard for shard in self.shards if shard.kind != "buffers" or shard.spec.name in kept]
        for name, parts in self.by_name.items():
            if any(overlaps(a.spec, b.spec) for a, b in itertools.combinations(parts, 2)):
                rank = self.comm.ranks[self.comm.rank]
                raise ValueError(f"two shards of {name} on rank {rank}: expected one of each tensor, or parts that "
                                 "have no element in common")

    @property
    def by_name(self) -> dict[str, list[Shard]]:
        """Return {name: the shards of this tensor}."""
        found = {}
        for shard in self.shards:
            found.setdefault(shard.spec.name, []).append(shard)
        return found

    @property
    def written(self) -> dict[Shard, str]:
        """Return {shard: the name of its part in files} of all that this rank owns elements of."""
        return {shard: part_name(name, number) for name, parts in self.by_name.items()
                for number, shard in enumerate(shard for shard in parts if shard.owned is not None
                                               and shard.owned.numel)}

    @contextlib.contextmanager
    def one_group(self) -> Iterator[Callable[[Any], Any]]:
        """Give a function `load(group)`, which loads a group in the place of the one before; the last until the end."""
        now = []
        with contextlib.ExitStack() as stack:
            def load(group):
                if now != [group]:
                    now.clear()
                    stack.close()  # before the next one is loaded: a store has room for one
                    stack.enter_context(self.loaded(group))
                    now.append(group)
            yield load


def _names(model):
    """Return {each name in the whole model's state_dict: the tensor's name in specs}. A tied tensor has several."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {}
    for name, tensor in every:
        first.setdefault(tensor, spec_of(name, tensor).name)
    kept = model.state_dict(keep_vars=True).keys()
    return {whole: first[tensor] for name, tensor in every if name in kept for whole in names_of(name, tensor)}
