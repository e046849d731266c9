"""Each technique beside its production peer, in one process: `python -m refimpl.bench NAME`.

A bench is a module of this folder with a function `run() -> (settings, rows)`: `settings` says what was run (shapes,
rounds), and `rows` are made by `record.row`. Its name is its line in `NAMES`.
"""

from .record import measurement
from .runner import compare

NAMES = ("meter", "comm", "precision", "accumulation", "checkpointing", "sequences")

__all__ = ["NAMES", "compare", "measurement"]
