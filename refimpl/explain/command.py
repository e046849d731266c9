"""`refimpl explain SCRIPT [args]`: which bytes a training script takes, and what would help."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..untrusted.text import one_line, print_text, refuse
from .explanation import Explanation
from .helps import TECHNIQUES
from .phases import REACHED
from .report_files import write
from .script import Script
from .script_run import STEPS
from .script_run import run as run_script
from .switch import SWITCHES


def add_arguments(parser):
    """Add the command's arguments to an argparse parser. What follows SCRIPT is the script's own."""
    parser.add_argument("--steps", type=_count, default=STEPS, metavar="K",
                        help=f"end the script after K steps of its optimizers; default: {STEPS}, as many as show what "
                             "grows from step to step")
    parser.add_argument("--until", metavar="PHASE", choices=REACHED,
                        help=f"go on, after K steps, to the first step behind one of {', '.join(REACHED)}")
    parser.add_argument("--out", metavar="FOLDER", help="write explain.html, .png and .json, and timeline.html there")
    parser.add_argument("--try", dest="switch", metavar="NAME", choices=SWITCHES,
                        help=f"run with a technique switched on from outside: {', '.join(SWITCHES)}")
    parser.add_argument("--all", action="store_true", help="say of each technique that saves nothing why")
    # PARSER takes all that follows. With a REMAINDER after it argparse drops a "--", which is the script's own.
    parser.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT",
                        help="a training script, run as it is; what follows are its own arguments")


def _count(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of steps, 1 or more")
    return int(text)


def run(arguments, parser):
    """Run the script, print its explanation and end with its status: 0 once its steps are made."""
    try:
        path, *own = arguments.script[arguments.script[0] == "--" :]
        script = Script(path, own)
    except OSError as error:
        refuse(parser, error)

    before = _without(arguments) if arguments.switch else {}

    def report(made):
        if made.is_parent and int(os.environ.get("RANK", 0)) == 0:  # of several ranks one speaks
            say(made, arguments.out, before, arguments.all)

    made = run_script(script, arguments.steps, arguments.switch, report, arguments.until)
    report(made)
    if made.status:
        sys.exit(made.status)


def _without(arguments):
    """Explain the script as it is, in a process of its own, and return what its JSON has."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "refimpl", "explain", "--steps", str(arguments.steps), "--out", folder]
        command += ["--until", arguments.until] if arguments.until else []
        done = subprocess.run([*command, *arguments.script], stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(done.returncode)
        return json.loads((Path(folder) / "explain.json").read_text(encoding="utf-8"))


def say(made, folder=None, before=None, everything=False):
    """Print the explanation of a Run, and write its files if there is a `folder`. `everything`: as in `text`.

    `before`: what the JSON of a run without the switched technique has, to compare with.
    """
    explanation = Explanation(made)
    print_text(f"\n{explanation.text(everything)}", flush=True)
    if made.switched is not None:
        print_text(f"\n{_compared(explanation, made, before)}")
    if folder is not None:
        for path in write(explanation, folder):
            print_text(f"wrote {one_line(path)}")


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
