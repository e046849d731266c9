"""Pipeline parallelism: each rank has some consecutive layers; micro-batches flow through them in a schedule.

Order of reading: `papers/pipeline` (1F1B on real ranks, in one screen), `instructions` (a schedule as data),
`schedules`, `zero_bubble` and `v_shapes` (eight orders), `named_schedules` (their names, what each costs in closed
form), `validate`, `papers/pipeline_simulator` (a step without ranks, in one screen), `step_simulation` and `drawing`.
Then what runs them: `executor`, `messages` and `mailbox` (what goes between ranks, and when it is freed),
`micro_batches`, `split` (a backward in two parts), `partition` and `stages` (which layers are whose), `tied`,
`same_schedule` (whether ranks fit together).
"""

from typing import TYPE_CHECKING

from ..common.lazy import lazily
from ..common.materializing import build
from .executor import PipelineParallelStage, pipeline
from .instructions import Instruction, Schedule
from .named_schedules import BUILDERS, idle_time, in_flight, schedule
from .partition import partition
from .split import SplitBackward
from .step_simulation import Costs, simulate
from .validate import DeadlockError, ScheduleError, validate

if TYPE_CHECKING:
    from .drawing import draw

__getattr__, __dir__ = lazily(__name__, {".drawing": "draw"})
__all__ = ["BUILDERS", "Costs", "DeadlockError", "Instruction", "PipelineParallelStage", "Schedule", "ScheduleError",
           "SplitBackward", "build", "draw", "idle_time", "in_flight", "partition", "pipeline", "schedule",
           "simulate", "validate"]
