"""A model in pipeline stages, after tensor parallelism has split its layers: what is here, and who has the same."""

import dataclasses
import itertools

from torch import nn

from ..pipeline.stages import LayerOfAnotherStage, part_of, stage_of
from ..pipeline.tied import shared
from ..sharding import names_of, room_of, set_apart, set_spec, spec_of


class Division:
    """The stages of a rank.

    - `stages`: {number: module} of this rank.
    - `here`: one module of all of these layers, which share their parameters with `stages`, under the model's names.
    - `tied`: [{stage: name of a parameter there}] of what stages share, also those of other ranks.
    """

    def __init__(self, model, ends, order, mesh):
        every = [stage_of(model, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        mine, firsts = order.stages_of(mesh.here["pp"]), [0, *ends[:-1]]
        self.here = part_of(model, list(itertools.chain(*(range(firsts[s], ends[s]) for s in mine))))
        self.stages, self.tied = {s: every[s] for s in mine}, shared(every)
        for tie in self.tied:
            _name_holders(every, tie, order, mesh)

    @property
    def layers(self):
        """Return the layers of this rank, one after the other."""
        return layers_of(self.here)


def layers_of(stage):
    """Return the layers of a stage, as a list."""
    lists = [module for module in stage.modules() if isinstance(module, nn.ModuleList)]
    return [layer for layer in (lists[0] if lists else stage.children()) if not isinstance(layer, LayerOfAnotherStage)]


def _name_holders(stages, tie, order, mesh):
    """Say of a parameter that stages share which ranks hold the same, so that it counts once in norms and is saved
    once; and give it a bucket of its own, so that ZeRO cuts it alike on these ranks."""
    first, name = min(tie.items())
    parameter = stages[first].get_parameter(name)
    ranks = {order.rank_of[s] for s in tie}
    if len(ranks) == 1:
        return
    spec, names = spec_of(name, parameter), dict.fromkeys(names_of(name, parameter))
    names.update(dict.fromkeys(tie.values()) if spec.lengths == spec.shape and spec.name == name else {})
    peers = [mesh.coordinates(rank) for rank in spec.replicas or (mesh.comm.rank,)]
    holders = sorted({mesh.rank_at(**{axis: at[axis] for axis in ("tp", "cp", "dp")}, pp=pp)
                      for at in peers for pp in ranks})
    set_spec(parameter, dataclasses.replace(spec, replicas=tuple(holders)), names, room_of(parameter))
    set_apart(parameter)
