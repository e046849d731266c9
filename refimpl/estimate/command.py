"""`refimpl estimate MODEL`: the bytes of a rank by category, without a GPU and without memory."""

import argparse

from ..untrusted.text import print_json, print_text, refuse
from .estimate import estimate
from .report import as_json, as_text
from .training_options import CHOICES, Options

TABLES = "\n".join(f"{name}:\n" + "\n".join(f"  {key:<14} {what}" for key, what in table.items())
                   for name, table in CHOICES.items())


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.epilog = TABLES
    parser.add_argument("model", metavar="MODEL", help="a name of the catalog (llama3-8b), a config.json of Hugging "
                        "Face, or file.py:function: a function that returns a model, or (model, batch)")
    for name, what in (("batch", "sequences on a GPU in a step; default 1"),
                       ("sequence", "tokens of each; default: the model's context"), ("gpus", "default 1")):
        parser.add_argument(f"--{name}", type=number, metavar="N", help=what)
    for name, what in (("window", "each token sees so many before it, by block-sparse attention"),
                       ("global-tokens", "with --window: and the first so many")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument("--zero", type=stage, metavar="STAGE", help="0 (data parallel, the default), 1, 2 or 3")
    parser.add_argument("--recompute", action="store_true", help="keep of each block its input alone")
    for name, table in CHOICES.items():
        parser.add_argument(f"--{name}", choices=list(table))
    parser.add_argument("--gpu", metavar="NAME", help="of the catalog (a100-80): whose kernels run, and whether it "
                        "fits; default: h100-sxm's kernels; cpu: a CPU's")
    parser.add_argument("--json", action="store_true", help="print JSON")


def number(text):
    """Read a whole number of at least 1. argparse's ArgumentTypeError for another."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}: expected a whole number of at least 1")
    return int(text)


def stage(text):
    """Read a stage of ZeRO. argparse's ArgumentTypeError for none."""
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}: expected 0 (data parallel), 1, 2 or 3")
    return int(text)


def run(arguments, parser):
    """Print an estimate. Ends with one line and status 2 if there is no such model or training."""
    given = {name: value for name, value in vars(arguments).items()
             if name in Options.__dataclass_fields__ and value is not None}
    try:
        found = estimate(arguments.model, **given)
    except (ValueError, OSError) as error:
        refuse(parser, error)
    print_json(as_json(found)) if arguments.json else print_text(as_text(found))
