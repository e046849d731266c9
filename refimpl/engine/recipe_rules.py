"""What a recipe refuses before ranks start: values that cannot be, and values that cannot go together, with the reason.

All that is wrong is found and said in one error. A rule of two fields is a row of RULES: when it holds, and why.
`tests/engine/test_recipe_pairs.py` tries each pair of values: it composes, or a row here names both.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from ..allocator.settings import Settings
from ..mesh import Mesh
from ..pipeline import schedule as schedule_of

if TYPE_CHECKING:
    from .recipe import Recipe

DIVIDED = ("zb-h1", "zb-h2", "interleaved-zero-bubble", "zb-v", "dualpipe-v")  # schedules with backwards in two parts


class Rule(NamedTuple):
    """Two fields whose values cannot go together. `holds`: a function of a recipe; `why`: the reason and the cure."""

    names: tuple[str, str]
    holds: Callable[["Recipe"], bool]
    why: str


RULES = (
    Rule(("precision", "zero"), lambda r: r.precision in ("bf16", "fp16") and r.zero == 0,
         "data parallelism alone updates the parameters themselves, and has no fp32 masters: give zero=1, which has "
         "them on one rank, too"),
    Rule(("store", "zero"), lambda r: r.store != "device" and r.zero == 0,
         "at stage 0 nothing is in shards that could rest elsewhere: give zero=1, also on one rank"),
    Rule(("update", "zero"), lambda r: r.update == "host" and r.zero == 0,
         "at stage 0 the optimizer updates whole parameters where they are: give zero=1, also on one rank"),
    Rule(("update", "optimizer"), lambda r: r.update == "host" and not r.optimizer.startswith("adamw"),
         "the host computes AdamW alone: give optimizer=\"adamw\", or update=\"device\" with store=\"host\""),
    Rule(("precision", "update"), lambda r: r.precision == "fp16" and r.update == "host",
         "the host's kernel takes gradients as they are, and those in fp16 are scaled: give bf16, or store=\"host\", "
         "whose states are in host memory, too"),
    Rule(("store", "folder"), lambda r: (r.store == "disk") != (r.folder is not None),
         "a folder is for store=\"disk\", which needs one: a directory on a fast local disk"),
    Rule(("look_ahead", "zero"), lambda r: r.look_ahead != 1 and r.zero != 3,
         "only stage 3 gathers parameters, ahead or not"),
    Rule(("gathers", "zero"), lambda r: r.gathers != "whole" and r.zero != 3, "only stage 3 gathers parameters"),
    Rule(("in_flight_bytes", "zero"), lambda r: r.in_flight_bytes is not None and r.zero == 3,
         "stage 3 reduces layer by layer, and holds one layer's gradients: leave it out"),
    Rule(("compression", "dp"), lambda r: r.compression != "none" and r.dp * r.cp == 1,
         "with one rank of data no gradient is sent: leave compression out"),
    Rule(("compression", "shards"), lambda r: r.compression != "none" and r.shards not in (None, r.dp),
         "gradients go over two levels of ranks then, and what is left out on one would be lost: leave shards out"),
    Rule(("compression", "reduce_dtype"), lambda r: r.compression != "none" and r.reduce_dtype is not None,
         "a compressor says what is sent: leave reduce_dtype out"),
    Rule(("compression", "zero"), lambda r: r.compression == "powersgd" and r.zero > 1,
         "powersgd makes two thin matrices of a whole gradient, and there are shards alone from stage 2 on: give "
         "zero=1, or another compression"),
    Rule(("compression", "tp"), lambda r: r.compression != "none" and r.tp > 1,
         "ranks of tp hold some weights alike, as norms', beside parts of others, and each would leave out other parts "
         "of their gradients: leave compression out"),
    Rule(("compression", "pp"), lambda r: r.compression in ("powersgd", "random") and r.pp > 1,
         "weights that two stages share would be changed by other random numbers on each: give topk, threshold, int8 "
         "or sign"),
    Rule(("compression_ratio", "compression"), lambda r: r.compression_ratio != 0.01 and r.compression in (
        "none", "int8", "sign"), "it is the part of the numbers that topk, threshold, random and powersgd send"),
    Rule(("zero", "pp"), lambda r: r.zero > 1 and r.pp > 1,
         "each of a pipeline's micro-batches would reduce gradients, and at stage 3 gather parameters twice: use "
         "zero=1, the pipeline has cut parameters and gradients already"),
    Rule(("shards", "zero"), lambda r: r.shards not in (None, r.dp) and r.zero == 0, "stage 0 cuts nothing"),
    Rule(("sequence", "tp"), lambda r: r.sequence and r.tp == 1,
         "the tokens between layers are shared over tp; to share the whole sequence give cp"),
    Rule(("recompute", "sequence"), lambda r: r.recompute in ("attention", "mlp") and r.sequence,
         "what such a part reads is all tokens, and each rank would keep them whole: give \"blocks\" or \"attention "
         "core\""),
    Rule(("recompute", "schedule"), lambda r: r.recompute != "none" and r.pp > 1 and r.schedule in DIVIDED,
         "backwards are in two parts: what the first one has computed again would have to stay until the second. Use "
         "1f1b or interleaved"),
    Rule(("mlp", "recompute"), lambda r: r.mlp != "plain" and r.recompute in ("blocks", "mlp"),
         "the layer is computed again already, and both would compute it three times: give one of the two"),
    Rule(("mlp", "tp"), lambda r: r.mlp != "plain" and r.tp > 1,
         "its linear layers would be split, and it does not call them: give recompute=\"mlp\""),
    Rule(("activations", "schedule"), lambda r: r.activations != "kept" and r.pp > 1 and r.schedule in DIVIDED,
         "backwards in two parts hold what they saved for the second: use 1f1b or interleaved"),
    Rule(("attention", "cp"), lambda r: r.attention == "tiles" and r.cp > 1,
         "over ranks of cp attention goes by blocks of keys already: leave attention out"),
    Rule(("attention", "window"), lambda r: r.attention != "auto" and r.window is not None,
         "a window is block-sparse attention, in place of both: leave attention out"),
    Rule(("window", "context"), lambda r: r.window is not None and r.cp > 1 and r.context == "gathered",
         "gathered attention asks for the keys of some queries by itself, and would not know the window: give ring or "
         "ulysses"),
    Rule(("global_tokens", "window"), lambda r: r.global_tokens > 0 and r.window is None,
         "without a window each token sees all before it: leave global_tokens out"),
    Rule(("loss_scale", "precision"), lambda r: r.precision != "fp16" and r.loss_scale != 0,
         "only gradients in fp16 are scaled"),
    Rule(("schedule", "pp"), lambda r: r.pp == 1 and (r.schedule != "1f1b" or r.chunks is not None),
         "without a pipeline micro-batches come one after the other: give pp=2 or more"),
)


def check_recipe(recipe: "Recipe") -> None:
    """Raise ValueError with all that is wrong with a recipe, a line each."""
    wrong = [line for each in fields(recipe) for line in wrong_value(each, getattr(recipe, each.name))]
    if not wrong:  # rules and sizes compare values that can be
        wrong = [f"{' and '.join(f'{name}={getattr(recipe, name)!r}' for name in rule.names)}: {rule.why}"
                 for rule in RULES if rule.holds(recipe)] + list(wrong_sizes(recipe))
    if wrong:
        raise ValueError("\n".join([f"this recipe has {len(wrong)} faults:", *wrong] if len(wrong) > 1 else wrong))


def wrong_value(each, value) -> Iterable[str]:
    """Yield what is wrong with the value of one field of a recipe."""
    values, least, unit = (each.metadata[name] for name in ("values", "least", "unit"))
    if value is None and each.default is None:
        return
    if each.name == "recompute" and not isinstance(value, str):
        if type(value) is int and value >= 1 or type(value) is float and 0 < value <= 1:
            return
        yield (f"recompute={value!r}: expected one of {', '.join(values)}; an integer k of at least 1, for every "
               "k-th block; or a share of the blocks above 0.0 and up to 1.0")
    elif values is not None:
        if value not in values or type(value) is not type(next(iter(values))):
            near = difflib.get_close_matches(str(value), list(map(str, values)), 1)
            yield (f"{each.name}={value!r}: expected one of {', '.join(map(str, values))}"
                   + (f"; {near[0]}?" if near and isinstance(value, str) else ""))
    elif unit is None:
        if not isinstance(value, str):
            yield f"{each.name}={value!r}: expected a string, {each.metadata['means']}"
    else:
        whole = type(each.default) is int or each.default is None
        kind = type(value) is int if whole else isinstance(value, Real) and not isinstance(value, bool)
        if not kind or not least <= value < math.inf:
            yield (f"{each.name}={value!r}: expected {'a whole number' if whole else 'a number'} of {unit}, {least} or "
                   "more")


def wrong_sizes(recipe) -> Iterable[str]:
    """Yield what is wrong with sizes that depend on each other."""
    if recipe.shards is not None and recipe.dp % recipe.shards:
        yield (f"dp={recipe.dp} with shards={recipe.shards}: every replica has as many shards, so they divide dp: give "
               f"{_nearest(recipe.shards, recipe.dp)}")
    if recipe.pp > 1:
        try:
            schedule_of(recipe.schedule, recipe.pp, recipe.micro_batches, recipe.chunks)
        except ValueError as error:
            yield f"schedule={recipe.schedule!r} with pp={recipe.pp}: {error}"
    if recipe.compression_ratio == 0 or recipe.compression_ratio > 1:
        yield f"compression_ratio={recipe.compression_ratio}: expected a part of the numbers, above 0 and at most 1"
    try:
        Settings.parse(recipe.allocator)
    except ValueError as error:
        yield f"allocator={recipe.allocator!r}: {error}"


def _nearest(size, whole):
    """Return the divisors of `whole` on both sides of `size`, as words."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below, above = ([n for n in divisors if n < size][-1:], [n for n in divisors if n > size][:1])
    return " or ".join(str(n) for n in below + above)


def known(names: Iterable[str], recipe: Any) -> None:
    """Raise ValueError for names that are no field of a recipe, with the nearest that is."""
    there = [each.name for each in fields(recipe)]
    unknown = [name for name in names if name not in there]
    if unknown:
        near = {name: difflib.get_close_matches(name, there, 1) for name in unknown}
        raise ValueError("\n".join(f"a recipe has no {name!r}: " + (
            f"{near[name][0]}?" if near[name] else f"expected one of {', '.join(there)}") for name in unknown))


def mesh_of(recipe: "Recipe", world_size: int) -> Mesh:
    """Return the mesh. ValueError unless it has `world_size` ranks."""
    if recipe.world_size != world_size:
        sizes = " × ".join(f"{axis}={getattr(recipe, axis)}" for axis in ("tp", "cp", "dp", "pp"))
        rest = recipe.tp * recipe.cp * recipe.pp
        raise ValueError(f"{sizes} are {recipe.world_size} ranks, and {world_size} are here" + (
            f": give dp={world_size // rest}" if world_size % rest == 0 else
            f": {rest} ranks hold one copy of the model, and do not divide {world_size}"))
    return recipe.mesh
