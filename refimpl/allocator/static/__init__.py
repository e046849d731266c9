"""Static plans: offsets that are chosen before a step runs, from the lifetimes of a step that was recorded.

Order of reading: `common/lifetimes`, `greedy`, `static_plan` (offsets); `solver`, `problems` (where greedy is not
enough); `step_recording`, `arena`, `out_variants`, `execute`, `graphed`, `reuse` (a step that runs in its arena);
`drawing`.
"""

from ...common.lifetimes import Lifetimes
from .arena import Arena
from .drawing import snapshot_of
from .execute import Departure, Execution, execute, without_out
from .problems import load_problem, problem_names
from .reuse import ActivationReuseOptimizer
from .solver import solve
from .static_plan import OverlappingPlan, StaticPlan, plan_static
from .step_recording import StepTrace, record_step

__all__ = [
    "ActivationReuseOptimizer", "Arena", "Departure", "Execution", "Lifetimes", "OverlappingPlan", "StaticPlan",
    "StepTrace", "execute", "load_problem", "plan_static", "problem_names", "record_step", "snapshot_of", "solve",
    "without_out",
]
