"""Where the bytes are: a tracker that counts every tensor storage by category, the allocator's own reading, and a dry
run.

Order of reading: `papers/meter` (the idea in one screen), then the instruments: `common/ledger` (categories and bytes),
`tracker` and the `trace` that it writes (of `storage_records`, read as a `Timeline` and by `top`, kept in a
`trace_file`), `allocator`, `peaks`, `dry_running`, `workspaces` (tracker and allocator laid over each other). The
closed forms, which techniques use too, are on the ground: `common/state_bytes`, `common/activation_bytes`,
`common/step_bytes`; what draws them, `figure` and `gantt`, is there as well. `chrome` draws for a browser. `tracking/`
is the tracker's machinery: how it follows modules, finds lines, stays out of autograd's way and follows compiled code.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..common.activation_bytes import (
    activation_bytes,
    activation_terms,
    block_terms,
    korthikanti_bytes,
    korthikanti_terms,
)
from ..common.lazy import lazily
from ..common.ledger import CATEGORIES, Ledger, beside, human
from ..common.marks import mark
from ..common.nested_tensors import is_dry
from ..common.state_bytes import bytes_per_parameter, model_state_bytes
from ..common.step_bytes import training_step_bytes, training_step_moments
from .allocator import Reading, measure
from .dry_running import dry_run
from .storage_records import Line
from .top import Held
from .trace import Moment, Timeline, Trace, load
from .tracker import Tracker, track
from .workspaces import with_workspaces

if TYPE_CHECKING:
    from ..common.figure import plot
    from .chrome import export_chrome

# matplotlib takes as long to import as all of the rest
__getattr__, __dir__ = lazily(__name__, {"..common.figure": "plot", ".chrome": "export_chrome"})
__all__ = [
    "CATEGORIES", "Held", "Ledger", "Line", "Moment", "Reading", "Timeline", "Trace", "Tracker", "activation_bytes",
    "activation_terms", "beside", "block_terms", "bytes_per_parameter", "dry_run", "export_chrome", "guard", "human",
    "is_dry", "korthikanti_bytes", "korthikanti_terms", "load", "mark", "measure", "model_state_bytes", "plot", "track",
    "training_step_bytes", "training_step_moments", "with_workspaces",
]


def guard(folder: Any, limit: int | None = None, stacks: str | None = "oom") -> Any:
    """Record a run while it trains, and report what fails: `with memory.guard("oom/"): train()`. See
    `refimpl.guard.Guard`, for whose floor this one asks by name."""
    return importlib.import_module("refimpl.guard").Guard(folder, limit, stacks)
