"""`refimpl estimate MODEL`: the bytes of a rank by category, without a GPU and without memory."""

import argparse
import importlib

from ..untrusted.text import print_json, print_text, refuse
from .estimate import estimate
from .report import as_json, as_text
from .training_options import CHOICES, Options

TABLES = "\n".join(f"{name}:\n" + "\n".join(f"  {key:<14} {what}" for key, what in table.items())
                   for name, table in CHOICES.items())


def add_arguments(parser, recipes=False):
    """Add the command's arguments to an argparse parser. `recipes`: those of recipes, too, which load the engine."""
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
    parser.add_argument("--recompute", nargs="?", const=True, type=policy, metavar="POLICY",
                        help="keep of each block its input alone; of a recipe: what backward computes again, blocks, "
                        "attention, \"attention core\", mlp, every k-th block (2), or a share of them (0.5)")
    for name, table in CHOICES.items():
        parser.add_argument(f"--{name}", choices=[*table, *["fp16"] * (name == "precision")])
    parser.add_argument("--gpu", metavar="NAME", help="of the catalog (a100-80): whose kernels run, and whether it "
                        "fits; default: h100-sxm's kernels; cpu: a CPU's")
    parser.add_argument("--json", action="store_true", help="print JSON, as docs/estimate.schema.json says")
    if recipes:
        importlib.import_module(".recipe_options", __package__).add_arguments(parser)


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


def policy(text):
    """Read what is recomputed: an integer, a fraction, or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def run(arguments, parser):
    """Print an estimate, of a recipe if any option asks for one. Ends with one line and status 2 if there is no such
    model or training."""
    options = {name: value for name, value in vars(arguments).items()
               if name in Options.__dataclass_fields__ and value is not None}
    try:
        said = importlib.import_module(".recipe_options", __package__).answer(arguments, options)
        if said is None:
            found = estimate(arguments.model, **options)
            said = as_json(found) if arguments.json else as_text(found)
    except (ValueError, OSError) as error:
        refuse(parser, error)
    print_json(said) if isinstance(said, dict) else print_text(said)
