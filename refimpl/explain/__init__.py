"""`refimpl explain SCRIPT [args]`, and `refimpl check FILE`: which bytes a script takes, why, and what would help.

Order of reading: `script` (run it as Python would), `steps` (end it after k optimizer steps), `recording` and `models`
(what is written down meanwhile), `run` (these together); then `replay` (a recording with some bytes taken away),
`kinds` and `arithmetic` (what "16 bytes × parameters" leaves out), `helps/` (what each technique would save),
`switch` (techniques switched on from outside); `explanation`, `writing` and `command` say it; `check` is for CI.
"""

from .explanation import Explanation
from .run import Run, run
from .script import Function, Script

__all__ = ["Explanation", "Function", "Run", "Script", "run"]
