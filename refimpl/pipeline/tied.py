"""Parameters that stages of different ranks share, as a GPT's embedding and its head: one value, one gradient.

Each rank has a copy. All begin with the values of the first stage that has it. After a step's last backward the ranks
that have a copy add up their gradients of this step, so that optimizers update all copies alike:

    traffic of a tie      ring_traffic("all_reduce", bytes of the gradient, ranks that have a copy)
"""

import torch


def shared(stages):
    """Return [{stage: name of a parameter there}] for each parameter that more than one of these modules has."""
    found = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            found.setdefault(parameter, {})[number] = name
    return [names for names in found.values() if len(names) > 1]


class Ties:
    """Keeps this rank's copies equal to those of other ranks. All ranks make one together.

    `names`: as `shared` returns them, the same on all ranks. `stages`: {stage: module} of this rank. ValueError if a
    rank has two parameters of one tie.
    """

    def __init__(self, names, stages, comm, rank_of):
        groups, self._copies, self._before = {}, [], {}
        for tie in names:
            here = {stages[stage].get_parameter(name) for stage, name in tie.items() if stage in stages}
            if len(here) > 1:
                raise ValueError(f"{' and '.join(tie.values())} are tied and on one rank, as {len(here)} parameters: "
                                 "expected the same one in both modules")
            ranks = tuple(sorted({rank_of[stage] for stage in tie}))
            if len(ranks) == 1:  # one parameter in two modules of a rank: autograd adds
                continue
            if ranks not in groups:
                groups[ranks] = comm.split(ranks)
            for parameter in here:
                self._copies.append((parameter, groups[ranks]))
                groups[ranks].broadcast(parameter.detach(), ranks.index(rank_of[min(tie)]), out=parameter.detach())

    def begin(self):
        """Put aside the gradients of earlier steps: they are summed already."""
        for parameter, _ in self._copies:
            self._before[parameter], parameter.grad = parameter.grad, None  # summed again, they would count N times

    def end(self):
        """Sum this step's gradients over ranks, and add them to the earlier ones."""
        for parameter, group in self._copies:
            before = self._before.pop(parameter)
            if parameter.requires_grad:
                # Others wait for it all the same.
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                group.all_reduce(mine, out=mine)
                parameter.grad = mine if before is None else before.add_(mine)
