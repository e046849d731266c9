"""`refimpl run SCRIPT [args]`: run a training script as it is, with a guard around it."""

import argparse
import sys

from ..explain.script import Module, Script
from ..untrusted.text import print_raw, refuse, size
from .guard import Guard

EXAMPLE = """examples:
  refimpl run train.py --batch 8
  refimpl run --limit 70GiB --out oom/ train.py
  torchrun --nproc-per-node 8 -m refimpl run train.py
  refimpl oom oom/

The script's own status is the command's."""


def add_arguments(parser):
    """Add the command's arguments to an argparse parser. What follows SCRIPT is the script's own."""
    parser.add_argument("--out", metavar="FOLDER", default="oom",
                        help="where the log and the reports are written, of all ranks; default: oom")
    parser.add_argument("--limit", type=size, metavar="SIZE",
                        help="as 70GiB: let requests fail that would take the process beyond it")
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="SCRIPT is the name of a module, run as `python -m` runs it")
    parser.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT",
                        help="a training script; what follows are its own arguments")


def run(arguments, parser):
    """Run the script under a guard, and end with its status."""
    name, *rest = arguments.script[arguments.script[0] == "--" :]
    try:
        script = (Module if arguments.is_module else Script)(name, rest)
        guard = Guard(arguments.out, arguments.limit)
        guard.open_log()
    except (OSError, ValueError) as error:
        refuse(parser, error)
    ending = script.run(around=guard)
    if ending.text:
        sys.stdout.flush()
        print_raw(ending.text, file=sys.stderr, end="")
    if ending.status:
        sys.exit(ending.status)
