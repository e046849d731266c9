"""`refimpl explain SCRIPT [args]`, and `refimpl check FILE`: which bytes a script takes, why, and what would help.

Order of reading: `script` and `launchers` (run it as Python or they would), `steps` and `hand_written` (end it after k
optimizer steps), `recorder`, `uses` and `models` (what is written down meanwhile), `script_run` (these together),
`kept/` (what outlives its step, and who holds it), `lines_below` (of a library, under a line of the script's), `phases`
(where in the script a peak is), `longest` (the loader's longest batch), `no_gradients` (who got none); then
`recorded_timeline` (the peak without some bytes), `kinds` and `arithmetic` (what "16 bytes × parameters" leaves out),
`answers/` (what need not be there), `helps/` (what each technique would save), `switch` (techniques switched on from
outside), `budget` (until it fits); `explanation`, `report_files` and `command` say it; `check` is for CI.
"""

from .explanation import Explanation
from .script import Function, Module, Script
from .script_run import Run, run

__all__ = ["Explanation", "Function", "Module", "Run", "Script", "run"]
