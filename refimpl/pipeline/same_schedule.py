"""Whether the ranks of a pipeline fit together, found before anything is sent."""

import hashlib
import json

from ..comm.texts import gather_texts
from ..phantom.status import pretending


def check_stages(modules, comm, schedule):
    """Raise ValueError, on all ranks, unless they have the same Schedule, and together its stages in one dtype.
    A rank alone, in a dry run or where the others are pretended, has nobody to ask."""
    if not comm.has_others or pretending():
        return
    # A schedule is long: its hash travels.
    digest = hashlib.sha256(repr((schedule.ranks, schedule.rank_of)).encode()).hexdigest()
    mine = {"schedule": [schedule.name, schedule.micro_batches, digest],
            "stages": {s: sorted({str(x.dtype) for x in module.parameters() if x.is_floating_point()})
                       for s, module in modules.items()}}
    _check(comm, schedule, [json.loads(each) for each in gather_texts(comm, json.dumps(mine))])


def _check(comm, schedule, everyones):
    if len(schedule.ranks) != comm.world_size:
        raise ValueError(f"schedule {schedule.name} is for {len(schedule.ranks)} ranks, and there are "
                         f"{comm.world_size}: expected one for as many")
    if differ := comm.differing([each["schedule"] for each in everyones]):
        raise ValueError(f"ranks {differ} have another schedule than rank {comm.ranks[0]}: "
                         f"{everyones[comm.ranks.index(differ[0])]['schedule'][:2]}, and "
                         f"{everyones[0]['schedule'][:2]}")
    for rank, each in enumerate(everyones):
        stages = tuple(sorted(map(int, each["stages"])))
        if stages != schedule.stages_of(rank):
            raise ValueError(f"rank {comm.ranks[rank]} has stages {stages}: schedule {schedule.name} has "
                             f"{schedule.stages_of(rank)} there")
    dtypes = {int(s): set(found) for each in everyones for s, found in each["stages"].items() if found}
    first = min(dtypes, default=None)
    for s in sorted(dtypes):
        if dtypes[s] != dtypes[first]:
            raise ValueError(f"stage {s} has parameters of {', '.join(sorted(dtypes[s]))}, stage {first} of "
                             f"{', '.join(sorted(dtypes[first]))}: expected one dtype in all; convert the model before "
                             "it is divided")
