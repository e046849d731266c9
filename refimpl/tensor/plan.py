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
from ..proof.anatomy import anatomy_of


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
NOT_SPLIT = ("replicate", "local_params")  # what else transformers says of modules


def plan_of(model):
    """Return the plan of a GPT, of Hugging Face's GPT-2, or of a model of Hugging Face with a `base_model_tp_plan`.
    ValueError for another, with the names of its linear layers."""
    config = getattr(model, "config", None)
    if isinstance(model, GPT):
        return _plan_of_gpt(config)
    if getattr(config, "model_type", "") == "gpt2":
        return _plan_of_gpt2(model, config)
    if getattr(config, "base_model_tp_plan", None):
        return _plan_of_hugging_face(model, config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    raise ValueError(f"no plan is known for {type(model).__name__}: give one, {{name: style}} with the styles "
                     f"{', '.join(STYLES)}; its linear layers are {_listed(linears)}")


def _plan_of_gpt(config):
    D, H, G = config.head_dim, config.heads, config.kv_heads
    return {"embedding": "vocabulary", "blocks.*.attention.qkv": Column((H * D, G * D, G * D), (H, G, G)),
            "blocks.*.attention.out": Row(H), "blocks.*.mlp.up": "column",
            **({"blocks.*.mlp.gate": "column"} if config.gated else {}),
            "blocks.*.mlp.down": "row", "head": "head"}


def _plan_of_gpt2(model, config):
    base = model.base_model_prefix + "." if hasattr(model, model.base_model_prefix) else ""
    C, H = config.n_embd, config.n_head
    return {f"{base}h.*.attn.c_attn": Column((C, C, C), (H, H, H)), f"{base}h.*.attn.c_proj": Row(H),
            f"{base}h.*.mlp.c_fc": "column", f"{base}h.*.mlp.c_proj": "row", **_ends(model)}


def _plan_of_hugging_face(model, config):
    base = model.base_model_prefix + "." if hasattr(model, model.base_model_prefix) else ""
    plan = {base + name: "gathered" if style == "colwise_gather_output" else style
            for name, style in config.base_model_tp_plan.items() if style not in NOT_SPLIT}
    names = _names(model)
    return {**{name: style for name, style in plan.items() if _matches(name, names)}, **_ends(model)}


def _ends(model):
    """Return the plan of the embedding, and of the head that gives logits, of a model of Hugging Face."""
    names, head = {module: name for name, module in model.named_modules()}, model.get_output_embeddings()
    ends = {names[model.get_input_embeddings()]: "vocabulary"}
    return ends if head is None else {**ends, names[head]: "head"}


def matched(model, plan):
    """Return {name: style} of the modules that a plan names, in the model's order. ValueError for a name that matches
    no module, for an unknown style, and for a module of two styles."""
    found, names = {}, _names(model)
    for pattern, style in plan.items():
        style = OTHER_NAMES.get(style, style) if isinstance(style, str) else style
        if not isinstance(style, (Column, Row)) and style not in STYLES:
            raise ValueError(f"{pattern}: style {style!r}: expected one of {', '.join((*STYLES, *OTHER_NAMES))}, or a "
                             "Column or Row")
        here = _matches(pattern, names)
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


def _names(model):
    """Return {name: whether it is a module's, and not a parameter's}."""
    return {**dict.fromkeys((name for name, _ in model.named_modules()), True),
            **dict.fromkeys((name for name, _ in model.named_parameters()), False)}


def _matches(pattern, names):
    regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if regex.fullmatch(name)]


def region_of(model):
    """Return the names of the list of blocks and of the norm after it. ValueError if they are not known, or as
    `anatomy_of`."""
    if isinstance(model, GPT):
        return "blocks", "norm"
    if hasattr(model, "get_output_embeddings"):
        anatomy = anatomy_of(model)
        return anatomy.layers, anatomy.after
    raise ValueError(f"where the blocks of {type(model).__name__} begin and end is not known: give region=(name of the "
                     "list of blocks, name of the norm after it)")


def _listed(names):
    """Return names as one text, a layer's number as `*`, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
