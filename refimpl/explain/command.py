"""`refimpl explain SCRIPT [args]`: which bytes a training script takes, and what would help."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from ..untrusted.text import one_line, print_text, refuse, size
from .budget import fitting
from .explanation import Explanation
from .helps import TECHNIQUES
from .launchers import program
from .phases import REACHED
from .report_files import write
from .script_run import FROM_THE_START, STEPS, TooLong
from .script_run import run as run_script
from .switch import SWITCHES


def add_arguments(parser):
    """Add the command's arguments to an argparse parser. What follows SCRIPT is the script's own."""
    parser.add_argument("--steps", type=_count, default=STEPS, metavar="K",
                        help=f"end the script after K steps of its optimizers; default: {STEPS}, as many as show what "
                             "grows from step to step")
    parser.add_argument("--until", metavar="PHASE", type=_until,
                        help=f"go on, after K steps, to the first step behind one of {', '.join(REACHED)}; or, with "
                             "`step N`, to the N-th step")
    parser.add_argument("--out", metavar="FOLDER", help="write explain.html, .png and .json, and timeline.html there")
    parser.add_argument("--try", dest="switch", metavar="NAME", choices=SWITCHES,
                        help=f"run with a technique switched on from outside: {', '.join(SWITCHES)}")
    parser.add_argument("--budget", type=size, metavar="SIZE",
                        help="say whether the peak fits into SIZE, as 16GiB, and if not try the cheapest techniques")
    parser.add_argument("--with", dest="alone", metavar="NAMES", help=argparse.SUPPRESS)  # --try, and nothing beside it
    parser.add_argument("--all", action="store_true", help="say of each technique that saves nothing why")
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="SCRIPT is the name of a module, run as `python -m` runs it")
    # PARSER takes all that follows. With a REMAINDER after it argparse drops a "--", which is the script's own.
    parser.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT",
                        help="a training script, run as it is; what follows are its own arguments. Or: accelerate "
                             "launch [options] SCRIPT, torchrun [options] SCRIPT, of which one process is run")


def _count(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of steps, 1 or more")
    return int(text)


def _until(text):
    if text not in REACHED and not re.fullmatch(r"step [1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {', '.join(REACHED)}, or step N, with N steps, 1 or more")
    return text


def as_one_word(words):
    """Return the words of a command line with `--until step N`, where it stands before the script, as two in place of
    three: argparse knows no option that has one or two words."""
    at = 1
    while words[:1] == ["explain"] and at < len(words) and words[at].startswith("-"):
        if words[at] == "--until" and words[at + 1 : at + 2] == ["step"]:
            words = [*words[: at + 1], " ".join(words[at + 1 : at + 3]), *words[at + 3 :]]
        at += 1 if words[at] in ("-m", "--", "--all") or "=" in words[at] else 2
    return words


def run(arguments, parser):
    """Run the script, print its explanation and end with its status: 0 once its steps are made."""
    try:
        script = program(arguments.script[arguments.script[0] == "--" :], arguments.is_module)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        refuse(parser, error)

    before = _without(arguments) if arguments.switch else None

    def report(made):
        if made.is_parent and int(os.environ.get("RANK", 0)) == 0:  # of several ranks one speaks
            explanation = say(made, arguments.out, before, arguments.all)
            if arguments.budget:
                print_text("")
                for line in fitting(explanation.as_dict(), arguments.budget, partial(_tried, arguments)):
                    print_text(line, flush=True)

    until, _, number = (arguments.until or "").partition(" ")
    steps, switch = max(arguments.steps, int(number or 1)), arguments.switch or arguments.alone
    try:
        made = run_script(script, steps, switch, report, until if until in REACHED else None,
                          0 if steps <= FROM_THE_START or not number or switch else steps - arguments.steps)
    except TooLong as error:
        refuse(parser, error)
    report(made)
    if made.status:
        sys.exit(made.status)


def _without(arguments):
    """Explain the script as it is, in a process of its own, and return what its JSON has."""
    found = _tried(arguments)
    if found["status"]:
        sys.exit(found["status"])
    return found


def _tried(arguments, *names):
    """Explain the script with techniques switched on, in a process of its own, and return what its JSON has."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "refimpl", "explain", "--steps", str(arguments.steps), "--out", folder]
        command += ["--with", "+".join(names)] if names else []
        command += ["--until", arguments.until] if arguments.until else []
        command += ["-m"] if arguments.is_module else []
        done = subprocess.run([*command, *arguments.script], stdout=subprocess.DEVNULL)
        written = Path(folder) / "explain.json"
        return json.loads(written.read_text(encoding="utf-8")) if written.exists() else {"status": done.returncode or 1}


def say(made, folder, before, everything):
    """Print the explanation of a Run and return it, and write its files if there is a `folder`, not None.

    `before`: what the JSON of a run without the switched technique has, to compare with, or None. `everything`: as in
    `text`.
    """
    explanation = Explanation(made)
    print_text(f"\n{explanation.text(everything)}", flush=True)
    if before is not None:
        print_text(f"\n{_compared(explanation, made, before)}")
    if folder is not None:
        for path in write(explanation, folder):
            print_text(f"wrote {one_line(path)}")
    return explanation


def _compared(explanation, made, before):
    switched = made.switched
    title, cost = next((each.title, each.cost) for each in TECHNIQUES if each.name == switched.name)
    if not switched.applied:
        return f"not switched on ({title}): {(switched.refused or ['no model ran'])[0]}"
    if made.status and "peak" in before:  # such as a metric, of logits that are not made
        return f"switched on: {title}. The script, which runs without it, {made.words}. What it costs: {cost}"
    if "peak" not in before:
        return f"switched on: {title}"
    promised = next(each for each in before["helps"] if each["name"] == switched.name)
    was, now = before["peak of the last step"], explanation.timeline.last_peak
    return (f"switched on: {title}. The last step's peak was {was:,} bytes without it and is {now:,}: {was - now:,} "
            f"bytes saved; {'at most ' if promised['bound'] else ''}{promised['saves']:,} were promised, "
            f"{_verdict(promised, was - now)}")


def _verdict(promised, saved):
    """Whether a promise was kept: within 5 %, or as a bound."""
    if promised["bound"]:
        return "a bound that holds" if saved <= promised["saves"] else "a bound that does not hold"
    off = abs(promised["saves"] - saved) / max(abs(saved), promised["saves"], 1)  # none saved: 100 % off
    return f"{off:.1%} off" if off <= 0.05 else f"{off:.1%} off: the promise was wrong"
