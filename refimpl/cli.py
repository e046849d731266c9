"""The command line: `refimpl`, or `python -m refimpl`."""

import argparse
import sys
from pathlib import Path

from .allocator import command as replay
from .bench import __main__ as bench


def main(arguments=None):
    """Run the command in `arguments` (default: the shell's). Without a command, print the help."""
    called = "refimpl" if Path(sys.argv[0]).name == "refimpl" else "python -m refimpl"
    parser = argparse.ArgumentParser(prog=called, description="Techniques that save memory when training "
                                     "a large language model. The course is in notebooks/: make lab.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    benches = commands.add_parser("bench", help="run a technique beside its peer, and print or record the readings",
                                  description="Run a technique beside its peer.",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(benches)
    benches.set_defaults(run=bench.run, parser=benches)
    replays = commands.add_parser("replay", help="replay a CUDA memory snapshot: what is reserved, and why a request "
                                  "failed", description="Replay a CUDA memory snapshot on the caching allocator.")
    replay.add_arguments(replays)
    replays.set_defaults(run=replay.run, parser=replays)
    chosen = parser.parse_args(arguments)
    if "run" in chosen:
        chosen.run(chosen, chosen.parser)
    else:
        parser.print_help()
