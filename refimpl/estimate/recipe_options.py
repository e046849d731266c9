"""The options of `refimpl estimate` that describe a recipe: one for each of its fields, and a file in TOML."""

from dataclasses import fields
from pathlib import Path

from ..engine.recipe import Recipe
from ..untrusted.text import size
from . import recipe_report
from .recipe_estimate import estimate_recipe, fitted, on_ranks, why

BOTH = {"precision", "optimizer", "zero", "window", "global_tokens", "recompute"}  # that other estimates have, too
OTHERWISE = BOTH | {"attention", "sequence", "shards"}  # fields that are no options by their own names
ABOUT = ("Any of these estimates a recipe: techniques put together over the ranks of a mesh. --gpus is the number of "
         "all ranks, --batch the sequences of one place on dp.")


def add_arguments(parser):
    """Add the options of recipes to an argparse parser."""
    group = parser.add_argument_group("recipe", ABOUT)
    group.add_argument("--recipe", metavar="FILE", help="a recipe in TOML; other options change its fields")
    group.add_argument("--why", metavar="FILE", help="what leads from that recipe to this one, a field at a time, with "
                       "the bytes of each")
    group.add_argument("--budget", type=size, metavar="SIZE", help="recompute the fewest blocks with which the fullest "
                       "rank holds no more than this, as 40GiB")
    group.add_argument("--sequence-parallel", action="store_const", const=True, help="ranks of tp share the tokens "
                       "between layers, too")
    group.add_argument("--replicas", type=int, metavar="N", help="groups of dp that each have all shards; default 1")
    group.add_argument("--offload", choices=["host", "disk"], help="shards rest there, and the host updates them")
    for each in fields(Recipe):
        if each.name not in OTHERWISE:
            values, default = each.metadata["values"], each.default
            kind = type(default) if isinstance(default, (int, float)) else int if each.metadata["unit"] else str
            group.add_argument(f"--{each.name.replace('_', '-')}", type=kind, metavar="VALUE", help=each.metadata[
                "means"] + (f" ({', '.join(map(str, values))})" if values else ""))


def answer(arguments, options):
    """Return what the command says of a recipe, text or a dict; None if no option asks for one. `options`: those that
    any estimate has."""
    recipe = recipe_of({name: value for name, value in vars(arguments).items() if value is not None}, options)
    if recipe is None:
        return None
    world = options.get("gpus")
    others = {name: value for name, value in options.items() if name not in BOTH | {"gpus"}}
    if arguments.budget is not None:
        recipe = fitted(arguments.model, on_ranks(recipe, world), arguments.budget, **others)
    if arguments.why is not None:
        one, two = Recipe.from_toml(Path(arguments.why)), on_ranks(recipe, world)
        return "\n".join(map(str, why(arguments.model, one, two, **others))) or "the two recipes are the same"
    found = estimate_recipe(arguments.model, recipe, world, **others)
    return recipe_report.as_json(found) if arguments.json else recipe_report.as_text(found)


def recipe_of(given, options):
    """Return the Recipe that options describe; None if they ask for none."""
    changes = {each.name: given[each.name] for each in fields(Recipe)
               if each.name not in OTHERWISE and each.name in given}
    changes |= {"sequence": True} if "sequence_parallel" in given else {}
    if "offload" in given:
        changes |= {"store": given["offload"], "update": "host"}
    if changes.get("store") == "disk":
        changes.setdefault("folder", ".")  # no file is opened
    special = options.get("precision") == "fp16" or options.get("recompute") not in (None, True)
    if not changes and not special and not {"recipe", "why", "replicas", "budget"} & given.keys():
        return None
    changes |= {name: options[name] for name in BOTH if name in options}
    changes |= {"recompute": "blocks"} if changes.get("recompute") is True else {}
    changes |= {"precision": "bf16"} if changes.get("precision") == "bf16-master" else {}
    recipe = Recipe.from_toml(Path(given["recipe"])) if "recipe" in given else Recipe()
    if "replicas" in given:
        rest = changes.get("tp", recipe.tp) * changes.get("pp", recipe.pp) * changes.get("cp", recipe.cp)
        dp = changes.setdefault("dp", options["gpus"] // rest if "gpus" in options else recipe.dp)
        if given["replicas"] < 1 or dp % given["replicas"]:
            raise ValueError(f"replicas={given['replicas']} of dp={dp}: expected a number that divides it")
        changes["shards"] = dp // given["replicas"]
    return recipe.replace(**changes)
