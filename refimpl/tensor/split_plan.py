"""Plans: which module of a model is split how.

A plan is {name of modules: style}. In a name `*` stands for one part, such as a layer's number:

    {"layers.*.attention.q": "column", "layers.*.attention.out": "row", "embedding": "vocabulary", "head": "head"}

    column        a linear layer by its output features       (Hugging Face: colwise)
    row           a linear layer by its input features        (rowwise)
    vocabulary    an embedding by its tokens                  (embedding_rowwise)
    head          a linear layer by its output features, the logits, which are gathered (colwise_gather_output)
    gathered      any linear layer by its output features, which are gathered  (colwise_gather_output, in a model)
    row of whole  a linear layer by its input features, of which all ranks have all (rowwise_split_input)
    experts       a module whose parameters are split, and whose output is a part of a sum (moe_tp_experts)
    shared key    a linear layer that is whole, whose last features all heads read as one key (mla_kv_a_proj)
    whole         not split, but used on this rank's heads alone, such as a norm of each head: its gradient is summed
                  over the ranks (replicated_with_grad_allreduce)

A name may be a parameter's, of a module with a forward of its own, as the weights of all experts: "column" and "row"
are then its last dim but one and its last, "packed column" and "packed row" the same of two equal parts side by side.

A column may say more: `Column(parts=…, heads=…)`, as ColumnParallelLinear takes them.
"""

import re
from dataclasses import dataclass

from torch import nn

from ..model import GPT
from ..others import ask


@dataclass(frozen=True)
class Column:
    """Splits a linear layer by its output features: `parts` are sizes of layers fused in it, `heads` of each part."""

    parts: tuple | None = None
    heads: tuple | None = None


@dataclass(frozen=True)
class Row:
    """Splits a linear layer by its input features, which are those of so many `heads`. `of_whole`: every rank has all
    of them, and takes its own."""

    heads: int | None = None
    of_whole: bool = False


STYLES = ("column", "row", "vocabulary", "head", "gathered", "row of whole", "whole", "packed column", "packed row",
          "experts", "shared key")
OTHER_NAMES = {"colwise": "column", "rowwise": "row", "rowwise_split_input": "row of whole",
               "embedding_rowwise": "vocabulary", "colwise_rep": "head",
               "colwise_gather_output": "head", "replicated_with_grad_allreduce": "whole",
               "packed_colwise": "packed column", "packed_rowwise": "packed row", "moe_tp_experts": "experts",
               "mla_kv_a_proj": "shared key"}


def plan_of(model):
    """Return the plan of a GPT, of Hugging Face's GPT-2, or of a model of Hugging Face with a `base_model_tp_plan`.
    ValueError for another, with the names of its linear layers."""
    plan = _plan_of_gpt(model.config) if isinstance(model, GPT) else ask("plan", model)
    if plan is not None:
        return plan
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    raise ValueError(f"no plan is known for {type(model).__name__}: give one, {{name: style}} with the styles "
                     f"{', '.join(STYLES)}; its linear layers are {_listed(linears)}")


def _plan_of_gpt(config):
    D, H, G = config.head_dim, config.heads, config.kv_heads
    return {"embedding": "vocabulary", "blocks.*.attention.qkv": Column((H * D, G * D, G * D), (H, G, G)),
            "blocks.*.attention.out": Row(H), "blocks.*.mlp.up": "column",
            **({"blocks.*.mlp.gate": "column"} if config.gated else {}),
            "blocks.*.mlp.down": "row", "head": "head"}


def matched(model, plan):
    """Return {name: style} of the modules that a plan names, in the model's order. ValueError for a name that matches
    no module, for an unknown style, and for a module of two styles."""
    found, names = {}, names_of(model)
    for pattern, style in plan.items():
        # Hugging Face's own plans are read as they are.
        style = OTHER_NAMES.get(style, style) if isinstance(style, str) else style
        if not isinstance(style, (Column, Row)) and style not in STYLES:
            raise ValueError(f"{pattern}: style {style!r}: expected one of {', '.join((*STYLES, *OTHER_NAMES))}, or a "
                             "Column or Row")
        here = matches(pattern, names)
        if not here:
            raise ValueError(f"the plan's {pattern!r} matches no module; there are "
                             f"{_listed([name for name in names if names[name]][1:])}")
        for name in here:
            if names[name]:
                style = {"column": Column(), "row": Row(), "row of whole": Row(of_whole=True)}.get(style, style)
            if found.setdefault(name, style) != style:
                raise ValueError(f"{name}: the plan's {pattern!r} says {style}, and another of its names "
                                 f"{found[name]}: expected one style for each module")
    return {name: found[name] for name in names if name in found}


def names_of(model):
    """Return {name: whether it is a module's, and not a parameter's}."""
    return {**dict.fromkeys((name for name, _ in model.named_modules()), True),
            **dict.fromkeys((name for name, _ in model.named_parameters()), False)}


def matches(pattern, names):
    # A `*` is one part of a name, a layer's number: it has no dot.
    regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if regex.fullmatch(name)]


def region_of(model):
    """Return the names of the list of blocks and of the norm after it. ValueError if they are not known; also raises
    what `ask("blocks")` does."""
    if isinstance(model, GPT):
        return "blocks", "norm"
    if (anatomy := ask("blocks", model)) is not None:
        return anatomy.layers, anatomy.after
    raise ValueError(f"where the blocks of {type(model).__name__} begin and end is not known: give region=(name of the "
                     "list of blocks, name of the norm after it)")


def _listed(names):
    """Return names as one text, a layer's number as `*`, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
