"""Pipeline parallelism: each rank has some consecutive layers; micro-batches flow through them in a schedule.

Order of reading: `papers/pipeline` (1F1B on real ranks, in one screen), `instructions` (a schedule as data),
`schedules`, `zero_bubble` and `v_shapes` (eight orders), `catalogue` (their names, what each costs in closed form),
`validate`, `papers/pipeline_simulator` (a step without ranks, in one screen), `simulate` and `drawing`. Then what runs
them: `executor`, `messages` and `mailbox` (what goes between ranks, and when it is freed), `batches`,
`split` (a backward in two parts), `partition` and `stages` (which layers are whose), `tied`, `ranks` (whether ranks fit
together).
"""

from typing import TYPE_CHECKING

from ..ground.lazy import lazily
from ..ground.values import build
from .catalogue import BUILDERS, idle_time, in_flight, schedule
from .executor import PipelineParallelStage, pipeline
from .instructions import Instruction, Schedule
from .partition import partition
from .simulate import Costs, simulate
from .split import SplitBackward
from .validate import DeadlockError, ScheduleError, validate

if TYPE_CHECKING:
    from .drawing import draw

__getattr__, __dir__ = lazily(__name__, {".drawing": "draw"})
__all__ = ["BUILDERS", "Costs", "DeadlockError", "Instruction", "PipelineParallelStage", "Schedule", "ScheduleError",
           "SplitBackward", "build", "draw", "idle_time", "in_flight", "partition", "pipeline", "schedule",
           "simulate", "validate"]
