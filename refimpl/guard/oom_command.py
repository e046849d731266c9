"""`refimpl oom FOLDER`: what the guards of all ranks have written: who failed first, who was fullest, what differs."""

import json
import math
import time
from pathlib import Path

import psutil

from ..common.ledger import human
from ..untrusted.files import text_of
from ..untrusted.text import one_line, print_text, refuse
from .report import text
from .step_log import lines

LIMIT = 2**26  # bytes of a report
APART = 0.01  # share by which ranks differ where that is said


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.add_argument("folder", metavar="FOLDER", help="what a guard, or `refimpl run --out`, has written")


def run(arguments, parser):
    """Print what the folder has. Ends with one line and status 2 where it has nothing of a guard's."""
    try:
        for line in said(Path(arguments.folder)):
            print_text(line)
    except (OSError, ValueError) as error:
        refuse(parser, error)
    except (AttributeError, KeyError, TypeError) as error:
        refuse(parser, f"{arguments.folder} has lines that no guard has written: {error!r}")


class Rank:
    """What one rank has written. `steps`: its last lines; `failed`: notes of failures; `ended`: how, None if nothing
    tells."""

    def __init__(self, path):
        older = path.with_name(path.name.replace(".steps.jsonl", ".steps.1.jsonl"))
        found = [*(lines(older) if older.exists() else []), *lines(path)]
        self.name = path.name.removesuffix(".steps.jsonl")
        self.steps = [each for each in found if "step" in each and "peak" in each]
        self.failed = [*{each["failed"]: each for each in found if "failed" in each}.values()]  # each file has them all
        self.said = [each["said"] for each in found if "said" in each]
        self.ended = next((each["ended"] for each in found if "ended" in each), None)
        self.first = next((each for each in found if "process" in each), {})

    @property
    def last(self):
        """Return the last step's line."""
        return self.steps[-1] if self.steps else {}

    @property
    def peak(self):
        """Return the most that any step took."""
        return max((each["peak"] for each in self.steps), default=0)

    @property
    def how(self):
        """Return how it ended, in words."""
        if self.ended:
            return f"ended {self.ended}"
        try:
            if psutil.Process(self.first["process"]).create_time() == self.first["born"]:
                return "runs yet"
        except (psutil.Error, KeyError):
            pass
        return (f"was killed after step {self.last.get('step', 0)}: no error went through Python, as where the "
                "kernel's out-of-memory killer, or the launcher of another rank, ends a process")


def said(folder):
    """Yield the lines that are printed. ValueError where the folder has nothing of a guard's."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: expected one that `refimpl run` or memory.guard has written")
    ranks = [Rank(path) for path in sorted(folder.glob("rank*.steps.jsonl"))]
    if not ranks:
        raise ValueError(f"{folder} has no rank*.steps.jsonl: expected a folder that `refimpl run` or memory.guard has "
                         "written")
    yield f"{'rank':<10} {'steps':>7} {'at most':>11} {'at the end':>11}  how it ended"
    for each in ranks:
        now = human(each.last["now"]) if each.last else "-"
        yield f"{each.name:<10} {each.last.get('step', 0):>7,} {human(each.peak):>11} {now:>11}  {one_line(each.how)}"
    failed = sorted(((each["at"], rank.name, each) for rank in ranks for each in rank.failed),
                    key=lambda each: each[:2])
    fullest = max(ranks, key=lambda each: each.peak)
    if len(ranks) > 1:
        yield f"\nfullest: {fullest.name}, {human(fullest.peak)}"
        yield from _differences(ranks)
    for rank in ranks:
        yield from (f"{rank.name}: {one_line(words)}" for words in rank.said)
    if not failed:
        yield "\nno request failed"
        return
    at, first, found = failed[0]
    yield (f"\nfailed first: {first}, {time.strftime('%H:%M:%S', time.localtime(at))}" +
           (f"; then {', '.join(f'{name} ({after - at:.1f} s later)' for after, name, _ in failed[1:])}"
            if len(failed) > 1 else "") + "\n")
    if "not reported" in found:
        yield f"in step {found['step']}; there is no report of it: {one_line(found['not reported'])}"
        return
    path = folder / f"{first}.failure{found['failed']}.json"
    try:
        yield text(json.loads(text_of(path, LIMIT)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no report of a guard's: {error!r}") from error


def _differences(ranks):
    """Yield what ranks have more or less of than others, at the last step that all have made."""
    step = min((each.last.get("step", 0) for each in ranks), default=0)
    rows = {rank.name: next((line for line in rank.steps if line["step"] == step), None) for rank in ranks}
    rows = {name: line for name, line in rows.items() if line}
    if len(rows) < 2:
        return
    known = dict.fromkeys(key for line in rows.values() for key in line["known"])
    columns = {"peak": lambda line: line["peak"], "now": lambda line: line["now"],
               **{key: lambda line, key=key: line["known"].get(key, 0) for key in known},
               "numbers in the batch": lambda line: math.prod((line["batch"] or {}).get("shape", [0]))}
    for title, value in columns.items():
        found = {name: value(line) for name, line in rows.items()}
        most, least = max(found.values()), min(found.values())
        if most - least > APART * most:
            yield (f"in step {step}, {title}: " + ", ".join(f"{name} {n:,}" for name, n in found.items()))
