"""`refimpl check FILE`: does a recorded training step take more memory than it did? For users' CI.

The file is TOML. A person writes what to run; `--record` writes the table `[recorded]`, which is compared with later.
"""

import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..ground.ledger import Ledger
from .explanation import Explanation
from .run import run as run_script
from .script import Function, Script

EXAMPLE = """FILE says what to run:
  script = "train.py"            # or: function = "steps.py:step"; beside FILE
  arguments = ["--rows", "8"]    # the script's own
  steps = 2                      # optimizer steps
  tolerance = 0.02               # share by which the peak may grow"""
KEYS = {"script": "a path, as \"train.py\"", "function": "a function in a file, as \"steps.py:step\"",
        "arguments": "a list of texts, as [\"--rows\", \"8\"]", "steps": "a whole number, 1 or more",
        "tolerance": "a share from 0 to 1, as 0.02", "recorded": "a table, which --record writes"}
_RECORDED = re.compile(r"^\[recorded\][^\[]*", re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """What a file asks for. `recorded`: {"peak": bytes, category: bytes …}, empty before the first --record."""

    path: Path
    script: str | None = None
    function: str | None = None
    arguments: list = field(default_factory=list)
    steps: int = 2
    tolerance: float = 0.02
    recorded: dict = field(default_factory=dict)

    @classmethod
    def load(cls, path):
        """Read a file. OSError if there is none; ValueError with the key, its value and what was expected."""
        path = Path(path)
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
        for key, value in found.items():
            if key not in KEYS:
                raise ValueError(f"{path}: {key} = {value!r}: no such key; expected {', '.join(KEYS)}")
            if not _fits(key, value):
                raise ValueError(f"{path}: {key} = {value!r}: expected {KEYS[key]}")
        if ("script" in found) == ("function" in found):
            raise ValueError(f"{path}: expected script, {KEYS['script']}, or function, {KEYS['function']}: one of them")
        if "function" in found and found.get("arguments"):
            raise ValueError(f"{path}: arguments = {found['arguments']!r} beside function: expected them beside script")
        return cls(path, **found)

    def program(self):
        """Return the Script or Function, found beside the file. OSError or ValueError if there is none."""
        if self.function:
            return Function(self.function, self.path.parent)
        return Script(self.path.parent / self.script, self.arguments)

    def record(self, ledger):
        """Write the peak into the file; the rest of it stays as it was written."""
        text = _RECORDED.sub("", self.path.read_text(encoding="utf-8")).rstrip()
        lines = [f"peak = {ledger.total}", *(f"{name.replace(' ', '_')} = {nbytes}" for name, nbytes in ledger.items()),
                 f"torch = \"{torch.__version__}\""]
        self.path.write_text("\n".join([text, "", "[recorded]", *lines, ""]), encoding="utf-8")


def _fits(key, value):
    if key in ("script", "function"):
        return isinstance(value, str) and bool(value)
    if key == "arguments":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if key == "steps":
        return type(value) is int and value >= 1
    if key == "tolerance":
        return type(value) in (int, float) and 0 <= value <= 1
    return isinstance(value, dict) and type(value.get("peak")) is int and all(
        type(nbytes) is int for name, nbytes in value.items() if name != "torch")


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.add_argument("file", metavar="FILE", help="a TOML file that says what to run, and what it took")
    parser.add_argument("--record", action="store_true", help="write what it takes now into FILE")


def run(arguments, parser):
    """Run what the file names, and compare or record. Exit status 1 if the peak has grown beyond the tolerance, 2 for a
    bad file or none recorded, and the script's own if it fails."""
    try:
        plan = Plan.load(arguments.file)
        program = plan.program()
        if not arguments.record and not plan.recorded:
            raise ValueError(f"{plan.path} has no [recorded] yet: run with --record once, and commit it")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    made = run_script(program, plan.steps)
    if not made.is_parent:
        sys.exit(made.status)
    if not made.done:
        print(f"{program.name}: {made.words}; expected {plan.steps} optimizer steps", file=sys.stderr)
        sys.exit(made.status or 1)
    ledger = Explanation(made).moment.ledger
    if arguments.record:
        plan.record(ledger)
        print(f"recorded in {plan.path}: {ledger.total:,} bytes at the peak of {plan.steps} steps")
        return
    grown, words = compare(plan, ledger)
    print(words, file=sys.stderr if grown else sys.stdout)
    if grown:
        sys.exit(1)


def compare(plan, ledger):
    """Return (whether the peak has grown beyond the tolerance, that in words) for a Plan and a Ledger."""
    recorded = Ledger({name: nbytes for name, nbytes in plan.recorded.items() if name not in ("peak", "torch")})
    before, now = plan.recorded["peak"], ledger.total
    change = now / before - 1 if before else float(now > 0)
    figures = f"{now:,} bytes, {before:,} recorded, {change:+.1%} (tolerance {plan.tolerance:.1%})"
    if change <= plan.tolerance:
        fallen = "; less than recorded: --record keeps it so" if change < -plan.tolerance else ""
        return False, f"{plan.path.name}: the peak is {figures}{fallen}"
    difference = ledger - recorded
    grown = sorted(((nbytes, name) for name, nbytes in difference.items() if nbytes > 0), reverse=True)
    what = ", ".join(f"{name} {nbytes:+,}" for nbytes, name in grown) or "no single category"
    other = plan.recorded.get("torch", torch.__version__)
    versions = f"\nrecorded under torch {other}, this is {torch.__version__}" if other != torch.__version__ else ""
    return True, (f"{plan.path.name}: the peak has grown: {figures}\nwhat grew: {what}{versions}\n"
                  f"`refimpl explain` says which module and line; if it is meant, `refimpl check {plan.path} --record`")
