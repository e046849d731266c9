"""`refimpl check FILE`: does a recorded training step take more memory than it did? For users' CI.

The file is TOML. A person writes what to run; `--record` writes the table `[recorded]`, which is compared with later.
"""

import json
import os
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..common.ledger import Ledger
from ..saving.durable import replacing
from ..untrusted.files import text_of
from ..untrusted.text import one_line, print_text, refuse, shown
from .explanation import Explanation
from .script import Function, Module, Script
from .script_run import STEPS
from .script_run import run as run_script

EXAMPLE = """FILE says what to run:
  script = "train.py"            # or: function = "steps.py:step", or: module = "package.train"; beside FILE
  arguments = ["--rows", "8"]    # the script's own
  steps = 3                      # optimizer steps
  tolerance = 0.02               # share by which the peak may grow"""
KEYS = {"script": "a path, as \"train.py\"", "function": "a function in a file, as \"steps.py:step\"",
        "module": "the name of a module, as \"package.train\"",
        "arguments": "a list of texts, as [\"--rows\", \"8\"]",
        "steps": "a whole number, 1 or more, up to a million", "tolerance": "a share from 0 to 1, as 0.02",
        "recorded": "a table, which --record writes, with bytes by category and by phase, and a peak above 0"}
OF_PHASE = "peak_of_"  # begins the keys of phases in [recorded]
LIMIT = 2**18  # bytes of a file
LONGEST = 4096  # letters of a path
_HEADER = re.compile(r"""\s*\[\s*(recorded|"recorded"|'recorded')\s*\]\s*(#.*)?""")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class CheckFile:
    """What a file asks for. `recorded`: {"peak": bytes, category: bytes …, "peak_of_forward": bytes …}, empty before
    the first --record."""

    path: Path
    script: str | None = None
    function: str | None = None
    module: str | None = None
    arguments: list = field(default_factory=list)
    steps: int = STEPS
    tolerance: float = 0.02
    recorded: dict = field(default_factory=dict)

    @classmethod
    def load(cls, path):
        """Read a file. OSError if there is none; ValueError with the key, its value and what was expected."""
        path = Path(path)
        try:
            found = tomllib.loads(text_of(path, LIMIT))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
        for key, value in found.items():
            if key not in KEYS:
                raise ValueError(f"{path}: {key[:LONGEST]} = {shown(value)}: no such key; expected {', '.join(KEYS)}")
            if not _fits(key, value):
                raise ValueError(f"{path}: {key} = {shown(value)}: expected {KEYS[key]}")
        if sum(key in found for key in ("script", "function", "module")) != 1:
            raise ValueError(f"{path}: expected script, {KEYS['script']}, or function, {KEYS['function']}, or module, "
                             f"{KEYS['module']}: one of them")
        if "function" in found and found.get("arguments"):
            raise ValueError(f"{path}: arguments = {shown(found['arguments'])} beside function: expected them beside "
                             "script")
        return cls(path, **found)

    def program(self):
        """Return the Script, Function or Module, found beside the file. OSError or ValueError if there is none."""
        if self.function:
            return Function(self.function, self.path.parent)
        if self.module:
            return Module(self.module, self.arguments, self.path.parent)
        return Script(self.path.parent / self.script, self.arguments)

    def record(self, ledger, phases):
        """Write the peak, and that of each phase, into the file, whole or not at all; the rest of it stays as it was
        written. ValueError if the file cannot be edited so."""
        text, path = self.text_with(ledger, phases), os.path.realpath(self.path)  # a link stays a link
        with replacing(path) as beside:
            shutil.copymode(path, beside)
            with open(beside, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def text_with(self, ledger, phases=()):
        """Return the file's text with other peaks. ValueError if that would not read as it is meant, as where the
        table is not under a [recorded] of its own."""
        before = text_of(self.path, LIMIT)
        meant = {"peak": ledger.total, **{name.replace(" ", "_"): nbytes for name, nbytes in ledger.items()},
                 **{f"{OF_PHASE}{name}": nbytes for name, nbytes in dict(phases).items()},
                "torch": str(torch.__version__)}
        table = ["", "[recorded]", *(
            f"{name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)} = {json.dumps(value)}"
            for name, value in meant.items()), ""]
        for rest in _without_recorded(before):
            text = "\n".join([rest.rstrip(), *table])
            if _read(text) == {**_read(before), "recorded": meant}:
                return text
        raise ValueError(f"{self.path}: its recorded values cannot be replaced, as if they are not in a table "
                         "[recorded]: remove them by hand, then run with --record")


def _read(text):
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _without_recorded(text):
    """Go through the text without each table [recorded], up to the next table; then the text as it is. What looks like
    a table may be a line of a long string."""
    lines = text.split("\n")
    for first in range(len(lines)):
        if _HEADER.fullmatch(lines[first]):
            tables = (i for i in range(first + 1, len(lines)) if lines[i].lstrip().startswith("["))
            yield "\n".join(lines[:first] + lines[next(tables, len(lines)):])
    yield text


def _fits(key, value):
    if key in ("script", "function", "module"):
        return isinstance(value, str) and 0 < len(value) <= LONGEST
    if key == "arguments":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if key == "steps":
        return type(value) is int and 1 <= value <= 10**6
    if key == "tolerance":
        return type(value) in (int, float) and 0 <= value <= 1
    return isinstance(value, dict) and _is_recorded(value)


def _is_recorded(table):
    """Tell whether a table has what `CheckFile.record` writes."""
    numbers = {name: value for name, value in table.items() if name != "torch"}
    if type(table.get("torch", "")) is not str or len(table.get("torch", "")) > LONGEST or numbers.get("peak") == 0:
        return False
    if "peak" not in numbers or not all(type(each) is int and 0 <= each < 2**63 for each in numbers.values()):
        return False
    try:
        Ledger(_categories(table))
    except ValueError:
        return False
    return True


def _categories(table):
    return {name: nbytes for name, nbytes in table.items()
            if name not in ("peak", "torch") and not name.startswith(OF_PHASE)}


def _phases(table):
    return {name.removeprefix(OF_PHASE): nbytes for name, nbytes in table.items() if name.startswith(OF_PHASE)}


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.add_argument("file", metavar="FILE", help="a TOML file that says what to run, and what it took")
    parser.add_argument("--record", action="store_true", help="write what it takes now into FILE")


def run(arguments, parser):
    """Run what the file names, and compare or record. Exit status 1 if the peak, or a phase's, has grown beyond the
    tolerance or is of 0 bytes, 2 for a bad file or none recorded, and the script's own if it fails."""
    try:
        plan = CheckFile.load(arguments.file)
        program = plan.program()
        if arguments.record:
            plan.text_with(Ledger(parameters=1))  # before the run: whether the file can be edited
        elif not plan.recorded:
            raise ValueError(f"{plan.path} has no [recorded] yet: run with --record once, and commit it")
    except (OSError, ValueError) as error:
        refuse(parser, error)
    made = run_script(program, plan.steps)
    if not made.is_parent:
        sys.exit(made.status)
    if not made.done:
        print_text(one_line(f"{program.name}: {made.words}; expected {plan.steps} optimizer steps"), file=sys.stderr)
        sys.exit(made.status or 1)
    explanation = Explanation(made)
    ledger = explanation.moment.ledger
    if arguments.record:
        _record(plan, ledger, explanation.phases, parser)
        return
    grown, words = compare(plan, ledger, explanation.phases)
    print_text(words, file=sys.stderr if grown else None)
    if grown:
        sys.exit(1)


def _record(plan, ledger, phases, parser):
    if not ledger.total:
        print_text(f"{one_line(plan.path)}: not recorded: the peak has 0 bytes", file=sys.stderr)
        sys.exit(1)
    try:
        plan.record(ledger, phases)
    except (OSError, ValueError) as error:
        refuse(parser, error)
    print_text(f"recorded in {one_line(plan.path)}: {ledger.total:,} bytes at the peak of {plan.steps} steps")


def compare(plan, ledger, phases):
    """Return (whether a peak has grown beyond the tolerance, that in words) for a CheckFile, the Ledger at the peak and
    {phase: bytes}, each at its peak."""
    recorded = Ledger(_categories(plan.recorded))
    before, now, name = plan.recorded["peak"], ledger.total, one_line(plan.path.name)
    change = now / before - 1
    figures = f"{now:,} bytes, {before:,} recorded, {change:+.1%} (tolerance {plan.tolerance:.1%})"
    known = [(each, phases.get(each, 0), nbytes) for each, nbytes in _phases(plan.recorded).items()]
    larger = [f"{one_line(each)} {nbytes:,} bytes, {was:,} recorded" for each, nbytes, was in known
              if nbytes > was * (1 + plan.tolerance)]
    if change <= plan.tolerance and not larger:
        fallen = "; less than recorded: --record keeps it so" if change < -plan.tolerance else ""
        return False, f"{name}: the peak is {figures}{fallen}"
    difference = ledger - recorded
    grown = sorted(((nbytes, one_line(each)) for each, nbytes in difference.items() if nbytes > 0), reverse=True)
    what = ", ".join(f"{each} {nbytes:+,}" for nbytes, each in grown) or "no single category"
    peak = (f"the peak has grown: {figures}\nwhat grew: {what}" if change > plan.tolerance else
            f"the peak is {figures}, but in other phases more is taken")
    if larger:
        peak += f"\nphases, each at its peak: {'; '.join(larger)}"
    other = one_line(plan.recorded.get("torch", torch.__version__))
    versions = f"\nrecorded under torch {other}, this is {torch.__version__}" if other != torch.__version__ else ""
    return True, (f"{name}: {peak}{versions}\n"
                  "`refimpl explain` says which module and line; if it is meant, `refimpl check "
                  f"{one_line(plan.path)} --record`")
