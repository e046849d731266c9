"""The command line: `refimpl`, or `python -m refimpl`."""

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

from .allocator import command as replay
from .estimate import command as estimate
from .explain import check
from .explain import command as explain
from .guard import oom_command, run_command
from .rehearse import command as rehearse
from .untrusted.text import one_line, print_raw, print_text
from .versions import untested


class Parser(argparse.ArgumentParser):
    """Prints its help and its errors on any terminal: an error is one line, whatever the shell gave."""

    def error(self, message):
        """Print the usage and the error, and end with status 2."""
        super().error(one_line(message))

    def _print_message(self, message, file=None):
        if message:
            print_raw(message, file or sys.stderr, end="")


def benchmarks(checkout=Path(__file__).parents[1]):
    """Return the command of the benchmarks, which a checkout has beside the package. Exits where there are none."""
    if not (checkout / "benchmarks" / "__main__.py").exists():
        sys.exit("refimpl bench: the benchmarks are not in the installed package. They are in the folder benchmarks/ "
                 "of the repository: clone it, and run `refimpl bench` there")
    sys.path.insert(0, str(checkout))  # before a benchmarks/ of the caller's
    return importlib.import_module("benchmarks.__main__")


def main(arguments=None):
    """Run the command in `arguments` (default: the shell's). Without a command, print the help."""
    called = "refimpl" if Path(sys.argv[0]).name == "refimpl" else "python -m refimpl"
    parser = Parser(prog=called, description="Techniques that save memory when training "
                                     "a large language model. The course is in notebooks/: make lab.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    benches = commands.add_parser("bench", help="run a technique beside its peer, and print or record the readings",
                                  description="Run a technique beside its peer.",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["bench"]:
        bench = benchmarks()
        bench.add_arguments(benches)
        benches.set_defaults(run=bench.run, parser=benches)
    replays = commands.add_parser("replay", help="replay a CUDA memory snapshot: what is reserved, and why a request "
                                  "failed", description="Replay a CUDA memory snapshot on the caching allocator.")
    replay.add_arguments(replays)
    replays.set_defaults(run=replay.run, parser=replays)
    estimates = commands.add_parser("estimate", help="say what a rank of a training would hold, and whether it fits",
                                    description="Run a training step on tensors without memory, and print the bytes "
                                    "of a rank by category.", formatter_class=argparse.RawDescriptionHelpFormatter)
    estimate.add_arguments(estimates, given[:1] == ["estimate"])
    estimates.set_defaults(run=estimate.run, parser=estimates)
    explains = commands.add_parser("explain", help="run a training script for some steps: which bytes it takes, and "
                                   "what would help", description="Run a training script, unchanged, for some steps of "
                                   "its optimizer; print the bytes at the peak, what the arithmetic leaves out, and "
                                   "what would help.")
    explain.add_arguments(explains)
    explains.set_defaults(run=explain.run, parser=explains)
    rehearses = commands.add_parser("rehearse", help="run a training script on PyTorch's own allocator, for GPUs that "
                                    "are not there", description="Run a training script, unchanged, for some steps of "
                                    "its optimizers on PyTorch's own CUDA allocator, over a device that has a GPU's "
                                    "memory and computes nothing.", epilog=rehearse.EXAMPLE,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    rehearse.add_arguments(rehearses)
    rehearses.set_defaults(run=rehearse.run, parser=rehearses)
    runs = commands.add_parser("run", help="run a training script to its end, record what it takes, and report what "
                               "fails", description="Run a training script, unchanged, with a recorder that stays on.",
                               epilog=run_command.EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_command.add_arguments(runs)
    runs.set_defaults(run=run_command.run, parser=runs)
    ooms = commands.add_parser("oom", help="read what `refimpl run` has written on all ranks: who failed, and why",
                               description="Read what the recorders of all ranks have written.")
    oom_command.add_arguments(ooms)
    ooms.set_defaults(run=oom_command.run, parser=ooms)
    checks = commands.add_parser("check", help="fail if a recorded step takes more memory than it did: for CI",
                                 description="Fail if a recorded step takes more memory than it did.",
                                 formatter_class=argparse.RawDescriptionHelpFormatter, epilog=check.EXAMPLE)
    check.add_arguments(checks)
    checks.set_defaults(run=check.run, parser=checks)
    chosen = parser.parse_args(explain.as_one_word(given))
    if "run" in chosen:
        if said := untested(torch.__version__):
            print_text(said, file=sys.stderr)
        try:
            try:
                chosen.run(chosen, chosen.parser)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # who read has enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes there
            sys.exit(1)
    else:
        parser.print_help()
