"""Tensor parallelism, applied to a model from outside: each rank keeps some of the heads, features and tokens.

    tensor_parallel(model, comm)        our GPT, Hugging Face's GPT-2, Llama and all that say how (base_model_tp_plan)
    tensor_parallel(model, comm, plan)  any other

Of a block's weights each rank holds 1/N; norms and biases of rows are whole on all ranks. A block sends two all_reduces
in forward and two in backward. "Megatron-LM" (Shoeybi et al. 2019), section 3.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.agreement import check_model
from ..equivalence.comparison import CannotShrink
from ..equivalence.cut_over_ranks import prove
from ..model import GPT
from ..others import ask, ask_of_others
from ..sharding import set_spec, spec_of
from .embedding import VocabularyParallelEmbedding
from .experts import cut_of, split_experts, split_parameter, split_shared_key
from .linear import ColumnParallelLinear, RowParallelLinear, Siblings, column_cuts, features_of, row_cut
from .random_streams import OwnRandom
from .same_batch import SameBatch
from .split_plan import Column, Row, matched, plan_of
from .vocabulary import vocabulary_parallel_cross_entropy

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

HOOKS = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called"))
         and name.startswith(("_forward", "_backward"))]
SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding)


def tensor_parallel(model: nn.Module, comm: "Communicator", plan: Any = None, *,
                    loss_parallel: bool = False) -> nn.Module:
    """Split `model` over the ranks of `comm`, in place; returns it. Every rank calls it with the same model,
    and then gives it the same batch. Before each forward the ranks compare what they give it (`same_batch`).

    - `comm`: the tensor-parallel group: `mesh.get_parallel_group("tp")`.
    - `plan`: {name of modules: style}, see `split_plan`. By default the model's own.
    - `loss_parallel`: for a model of Hugging Face: score labels on logits that stay split. The logits that it returns
      are then this rank's. A GPT always does so, as it returns no logits beside a loss.

    Each rank keeps its part of rank 0's values; on the meta device there are shapes alone. Each parameter and buffer
    gets a ShardSpec, so that an engine with `world=` sums norms and saves states as those of the whole model. Make
    optimizers afterwards. ValueError for an unknown model without a plan, a name that matches no module, heads that
    cannot be shared out, and a model that is split already; TypeError for a layer of another class. CollectiveMismatch
    if ranks give different models, and in a forward if they give it different batches.
    """
    return split_as(model, comm, plan, loss_parallel, proven_sums(model, comm, plan, loss_parallel))


def proven_sums(model, comm, plan=None, loss_parallel=False, then=None):
    """Prove that a model of transformers, split by its plan and cut further by `then(toy, comm)`, computes what it does
    whole. Returns the names of modules whose gradients have to be summed besides. Raises as `tensor_parallel`."""
    if any(isinstance(module, SPLIT) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is split already: expected a whole model")
    matched(model, plan_of(model) if plan is None else plan)  # what is no plan of this model is said first
    if comm.world_size == 1 or isinstance(model, GPT):
        return ()
    def cut(toy, comm, summed):
        _check_fits(toy, plan)
        split = split_as(toy, comm, plan, loss_parallel, summed)
        return split if then is None else then(split, comm)

    proven = prove(model, ("tensor", repr(plan), loss_parallel, then), cut, strict=plan is None)
    return () if proven is None else proven.summed


def _check_fits(toy, plan):
    """Raise CannotShrink for a user's plan that a toy cannot follow: of a layer that it has not, or of real sizes."""
    try:
        styles = {} if plan is None else matched(toy, plan)
    except ValueError as error:
        raise CannotShrink(f"a toy has not all that the plan names: {error}") from error
    for name, style in styles.items():
        parts, heads = getattr(style, "parts", None), getattr(style, "heads", None)
        if parts and sum(parts) != features_of(toy.get_submodule(name), name)[1] or isinstance(style, Row) and heads:
            raise CannotShrink(f"the plan has the real sizes of {name}, {style}, and a toy others")


def split_as(model, comm, plan, loss_parallel, summed=()):
    """Split a model, unproven, by its plan. `summed`: names of modules that are in no plan, and whose gradients are of
    this rank's part."""
    styles = matched(model, {**(plan_of(model) if plan is None else plan), **dict.fromkeys(summed, "whole")})
    _check(model, comm, styles)  # by all ranks, before one of them changes its model
    for name in [name for name, style in styles.items() if style == "whole"]:
        sum_gradients(model.get_submodule(name).parameters(), comm)
        del styles[name]
    parameters, experts, keys = _apart(model, comm, styles)
    heads_of = {name: _heads(model, name, style) for name, style in styles.items()}
    tied, made = _tied(model, styles), {}
    _check_cuts(model, comm, styles, heads_of)  # before anything is split
    _start_alike(model, comm)
    for name, style in parameters.items():
        split_parameter(model, comm, name, style)
    for name in experts:
        split_experts(model.get_submodule(name), comm)
    for name in keys:
        split_shared_key(model.get_submodule(name), comm, model.config.qk_rope_head_dim)
    for name, style in styles.items():  # one by one, so that no more than one layer is here whole and in part
        whole = model.get_submodule(name)
        made[name] = _split(whole, comm, name, style, heads_of[name]).train(whole.training)
        for hooks in HOOKS:  # the same dicts: who registered a hook can remove it
            setattr(made[name], hooks, getattr(whole, hooks))
        model.set_submodule(name, made[name])  # the whole layer goes, unless the caller has it
    for name, first in tied.items():
        made[name].weights[0] = weight = made[first].weight  # tied again: each was cut by itself
        weight.whole_names += (f"{name}.weight",)  # one block, saved under both names
    for parent, layers in _by_parent(model, made).items():
        _finish(parent, *zip(*layers, strict=True), comm)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not hasattr(tensor, "shard_spec"):
            spec = spec_of(name, tensor)
            # The same on all ranks, so that norms and files count it once.
            set_spec(tensor, type(spec)(name, spec.shape, replicas=comm.ranks if comm.world_size > 1 else ()))
    _split_loss(model, comm, made, styles, loss_parallel)
    model.register_forward_pre_hook(SameBatch(comm, model), prepend=True, with_kwargs=True)
    model.__deepcopy__ = _refuse_copy
    return model


def _apart(model, comm, styles):
    """Take from `styles` what is not a layer that is replaced: ({name of a parameter: style}, names of experts, names
    of layers with a shared key). ValueError for what cannot be split so."""
    modules = {name for name, _ in model.named_modules()}
    parameters = {name: styles.pop(name) for name in [*styles] if name not in modules}
    for name, style in parameters.items():
        cut_of(model, comm, name, style)
    found = [[name for name, style in styles.items() if style == kind] for kind in ("experts", "shared key")]
    for name in (*found[0], *found[1]):
        if styles.pop(name) == "shared key" and not hasattr(model.config, "qk_rope_head_dim"):
            raise ValueError(f"{name}: style 'shared key' needs the model's config.qk_rope_head_dim")
    if packed := [name for name, style in styles.items() if style in ("packed column", "packed row")]:
        raise ValueError(f"{packed[0]} is a module: 'packed column' is a parameter's style; give a Column(parts=…)")
    return parameters, *found


def _check(model, comm, styles):
    lines = [f"{name} {tuple(x.shape)} {x.dtype} {x.requires_grad} {x.is_meta}"
             for name, x in (*model.named_parameters(), *model.named_buffers())]
    check_model(comm, [*lines, *(f"{name}: {style}" for name, style in styles.items())])


@torch.no_grad()
def _start_alike(model, comm):
    """Give every rank the values of rank 0."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and comm.world_size > 1:
            comm.broadcast(tensor.detach(), 0, out=tensor.detach(), label=name)


def _tied(model, styles):
    """Return {name of a head: name of the embedding whose weight it shares}. ValueError if others share weights."""
    split = {name: model.get_submodule(name) for name, style in styles.items() if style in ("vocabulary", "head")}
    tied = {head: name for head, style in styles.items() if style == "head" for name, other in styles.items()
            if other == "vocabulary" and split[head].weight is split[name].weight}
    shared = {}
    for outer, parent in model.named_modules():  # a module that is in two places is listed twice
        for inner, module in parent._modules.items():
            for p in module._parameters.values() if module is not None else ():
                if p is not None:
                    shared.setdefault(p, []).append(f"{outer}.{inner}".lstrip("."))
    for names in shared.values():
        if any(name in styles for name in names) and len([name for name in names if name not in tied]) > 1:
            raise ValueError(f"{' and '.join(names)} share a weight: expected none of them in the plan, or an "
                             "embedding and its heads, all of them")
    return tied


def _check_cuts(model, comm, styles, heads_of):
    """Raise ValueError, with its name, for a layer that cannot be shared out."""
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if style == "vocabulary":
            VocabularyParallelEmbedding.cut(layer, comm, f"{name}.weight")
        elif isinstance(style, Row):
            row_cut(layer, comm, name, heads_of[name])
        else:
            column_cuts(layer, comm, name, getattr(style, "parts", None), heads_of[name])


def sum_gradients(parameters, comm):
    """Sum each parameter's gradient over the ranks, once; also if it is frozen now and trained later."""
    for p in parameters:
        if not hasattr(p, "gradient_is_summed"):  # a weight of two modules is listed twice
            trains, p.gradient_is_summed = p.requires_grad, True
            p.requires_grad_().register_hook(lambda gradient: comm.all_reduce(gradient))  # a frozen one takes no hook
            p.requires_grad_(trains)


def _refuse_copy(memo):
    raise TypeError("a model that tensor_parallel has split: deepcopy would lose what its parameters are parts of, and "
                    "the sums of their gradients; copy the model before it is split, and split the copy, too")


def _heads(model, name, style):
    """Return the heads of each part of a layer: those of the plan, else what the width of a head in its parent says."""
    if isinstance(style, Column) and style.heads or isinstance(style, Row) and style.heads:
        return style.heads
    width = getattr(_parent(model, _outer(model, name)), "head_dim", None)
    if not isinstance(width, int) or style in ("vocabulary", "head", "gathered") or (
            getattr(style, "of_whole", False)):
        return None
    features = features_of(model.get_submodule(name), name)[0 if isinstance(style, Row) else 1]
    if features % width:
        return None
    return features // width if isinstance(style, Row) else (features // width,)


def _split(module, comm, name, style, heads):
    if style == "vocabulary":
        return VocabularyParallelEmbedding.of(module, comm, f"{name}.weight")
    if style in ("head", "gathered"):
        return ColumnParallelLinear(module, comm, name, gather_output=True)
    if isinstance(style, Row):
        return RowParallelLinear(module, comm, name, heads=heads, of_whole=style.of_whole)
    return ColumnParallelLinear(module, comm, name, parts=style.parts, heads=heads)


def _outer(model, name):
    """Return the name of what a layer's parent calls: the layer, or an adapter that has been put around it."""
    outer = name.rpartition(".")[0]
    return outer if ask_of_others("adapted", model.get_submodule(outer)) is model.get_submodule(name) else name


def _by_parent(model, made):
    """Return {parent: [(layer that is split, what the parent calls), …]}, without embeddings and heads."""
    found = {}
    for name, module in made.items():
        column = isinstance(module, ColumnParallelLinear) and not module.gather_output
        if column or isinstance(module, RowParallelLinear):
            outer = _outer(model, name)
            parent, outer = _parent(model, outer), model.get_submodule(outer)
            if ask_of_others("adapted", parent) is None:  # not of an adapter, whose layer has the one that counts
                found.setdefault(parent, []).append((module, outer))
    return found


def _parent(model, name):
    """Return the module that calls the one of this name; lists and dicts of modules are not called."""
    while isinstance(parent := model.get_submodule(name := name.rpartition(".")[0]), (nn.ModuleList, nn.ModuleDict)):
        pass
    return parent


def _finish(parent, layers, outers, comm):
    """Let the layers of one module work together: those that read the same x; counts of heads; random numbers."""
    columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    for size in dict.fromkeys(layer.in_features for layer in columns):
        Siblings([layer for layer in columns if layer.in_features == size])
    _count_heads(parent, columns)
    random = OwnRandom(comm)
    for layer, outer in zip(layers, outers, strict=True):  # dropout of what a layer by columns reads is of all ranks
        if outer is not layer or layer not in columns:
            outer.register_forward_pre_hook(lambda module, args: random.end())
        if layer in columns:
            outer.register_forward_hook(lambda module, args, output: random.begin() if module.training else None)
    parent.register_forward_hook(lambda module, args, output: random.end(), always_call=True)


def _count_heads(attention, columns):
    """Set the attributes in which an attention counts its heads to those that are here."""
    here = [(len(w.t() if layer.transposed else w), size, heads) for layer in columns
            for w, size, heads in zip(layer.weights, layer.parts, layer.heads, strict=True) if heads != size]
    if not here:
        return
    counts = [rows * heads // size for rows, size, heads in here]
    H, G = max(counts), min(counts)  # q has the most heads, k and v the fewest
    for name, count in {"num_heads": H, "num_attention_heads": H, "num_key_value_heads": G,
                        "num_key_value_groups": H // G, "queries_per_key": H // G,
                        **dict.fromkeys(("split_size", "attn_dim"), max(rows for rows, _, _ in here))}.items():
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, count)


def _split_loss(model, comm, made, styles, loss_parallel):
    """Score targets on logits that stay split."""
    heads = [made[name] for name, style in styles.items() if style == "head"]
    if isinstance(model, GPT) and heads:
        model.loss = functools.partial(_loss_of_gpt, comm=comm)
    elif loss_parallel:
        loss = heads and ask("loss", model, functools.partial(_loss_of_split, comm=comm, vocabulary=heads[0].features))
        if not loss:
            raise ValueError(f"loss_parallel=True for {type(model).__name__}: expected a model of Hugging Face with a "
                             "loss_function, and its head in the plan")
        heads[0].gather_output, model.loss_function = False, loss


def _loss_of_gpt(head, x_BTC, targets_BT, reduction, *, comm):
    logits = head(x_BTC, gather=False).flatten(0, 1)
    return vocabulary_parallel_cross_entropy(logits, targets_BT.flatten().long(), comm, head.features,
                                             reduction=reduction, overwrite=True)  # nobody else has these logits


def _loss_of_split(logits, targets, ignore_index, reduction, *, comm, vocabulary):
    return vocabulary_parallel_cross_entropy(logits.flatten(0, -2), targets.flatten(), comm, vocabulary,
                                             ignore_index=ignore_index, reduction=reduction)
