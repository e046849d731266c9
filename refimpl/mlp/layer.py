"""The layer, in the place of a feed-forward layer of someone else or made here."""

import inspect
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..common.derivatives import refuse_transforms
from ..others import ask
from .function import ACTIVATIONS, GATED, INSTEAD, FeedForward, MLPFunction, MLPSettings, NotFeedForward, run
from .toy import differs

KEEP = ("input", "hidden")
NAMES = ("gate_proj", "up_proj", "down_proj")  # of the layers of one that is made here


class MemoryEfficientMLP(nn.Module):
    """Computes act(x U) D, or (act(x G) ∘ x U) D, without keeping the hidden layer for backward.

        mlp = MemoryEfficientMLP(d, hidden, "swiglu", bias=False)
        block.mlp = MemoryEfficientMLP.of(block.mlp)           # of a Llama: same Parameters, same names
        memory_efficient_mlps(model)                           # every such MLP of a model

    - `activation`: "gelu", "gelu_tanh", "silu", "relu"; with a gate "swiglu", "geglu", "geglu_tanh", "reglu".
    - `keep`: "input" or "hidden", what is kept for backward. `chunk_size`: tokens at a time; by default all.

    One made `of` another computes what that does between its linear layers (gate and up may be one) and behind them.
    Without a kernel here for what is between, its own operations run again in backward, under autograd.

    Numbers are those of the plain layers, to the bit where the products are. Of a gate's two gradients by x, the sum is
    rounded once if keep is "hidden", or d exceeds the hidden layer. With chunks the weights' gradients are summed in
    another order, those of 16-bit layers in fp32. `mlp_bytes` gives the bytes. Under autocast x and weights are cast to
    its dtype, for the time of the call, and gradients of weights are rounded in theirs; fp64 is not cast, as in plain
    layers.

    The linear layers are not called: hooks that are put on them later do not run. Raises ValueError for unknown names
    and sizes, TypeError for dtypes that differ and for a layer that was put in another's place (an adapter's),
    RuntimeError for `create_graph=True`, a batch of gradients and transforms of torch.func.
    """

    def __init__(self, d: int, hidden: int, activation: str = "gelu", *, bias: bool = True, keep: str = "input",
                 chunk_size: int | None = None, dtype: torch.dtype | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        if activation not in ACTIVATIONS and activation not in GATED:
            raise ValueError(f"activation={activation!r}: expected one of {', '.join((*ACTIVATIONS, *GATED))}")
        *ups, down = names = NAMES[activation not in GATED :]
        for name in names:
            self.add_module(name, nn.Linear(*(hidden, d) if name == down else (d, hidden), bias, device, dtype))
        form = FeedForward(tuple(ups), down, (False,) * len(names), None, None, GATED.get(activation, activation),
                           ((1, 0), (0, 0))[-len(ups) :], hidden)
        self._set({True: form, False: form}, keep, chunk_size, inspect.signature(lambda x: x))

    def _set(self, forms, keep, chunk_size, signature):
        if keep not in KEEP:
            raise ValueError(f"keep={keep!r}: expected 'input' or 'hidden'")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens, or None")
        form = forms[True]
        gated = next((name for name, plain in GATED.items() if plain == form.activation), None)
        self.activation = gated if len(form.parts) == 2 else form.activation
        self.keep, self.chunk_size, self.names = keep, chunk_size, (*form.ups, form.down)
        self._forms, self._signature = forms, signature
        after = [*form.after.nodes] if form.after else []
        self.does_more = any(node.op not in ("placeholder", "output") for node in after)  # behind its last layer
        # an adapter put in later would be passed by
        self._kinds = [type(self.get_submodule(name)) for name in self.names]

    @classmethod
    def of(cls, mlp: nn.Module, *, keep: str = "input", chunk_size: int | None = None) -> "MemoryEfficientMLP":
        """Return a MemoryEfficientMLP that computes what `mlp` does, with its children under their names.

        `mlp` is read (`known_models/mlp`), and tried against it on a toy with weights of its own: the same numbers
        and gradients. TypeError for one that does more than a feed-forward layer, whose numbers differ, or that has
        hooks.
        """
        forms = ask("mlp", mlp)
        if why := differs(mlp, forms[True], lambda toy, *how: cls._of(toy, forms, *how)):
            raise TypeError(f"{type(mlp).__name__} computes something else than is read from its forward: {why}")
        return cls._of(mlp, forms, keep, chunk_size)

    @classmethod
    def _of(cls, mlp, forms, keep, chunk_size):
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        for name, child in mlp._modules.items():
            self.add_module(name, child)
        parameters = inspect.signature(mlp.forward).parameters.values()
        self._set(forms, keep, chunk_size, inspect.Signature([each.replace(annotation=each.empty)
                                                              for each in parameters]))
        self.training = mlp.training
        return self

    def extra_repr(self) -> str:
        return f"{self.activation}, keep={self.keep}, chunk_size={self.chunk_size}"

    @torch._disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output for x (…, d): (…, d). One made `of` another takes what that takes."""
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        form = self._forms[self.training]  # dropout, say, is there in training alone
        y = self._core(form, given.args[0])
        return y if form.after is None else run(form.after, self, y, *given.args)

    def _core(self, form, x):
        layers = [self.get_submodule(name) for name in self.names]
        for name, layer, kind in zip(self.names, layers, self._kinds, strict=True):
            if type(layer) is not kind:
                raise TypeError(f"{name} is a {type(layer).__module__}.{type(layer).__name__}, and was a "
                                f"{kind.__name__}: change layers before MLPs are replaced")
        up, *_, down = layers
        dtype, device = x.dtype, x.device.type
        if torch.is_autocast_enabled(device) and torch.float64 not in (dtype, up.weight.dtype, down.weight.dtype):
            dtype = torch.get_autocast_dtype(device)
        elif up.weight.dtype != dtype or down.weight.dtype != dtype:
            raise TypeError(f"x is of {dtype}, the weights of {up.weight.dtype} and {down.weight.dtype}: expected one "
                            "dtype (or autocast)")
        if x.shape[-1] != (d := up.weight.shape[not form.flipped[0]]):
            raise ValueError(f"x {tuple(x.shape)}: expected (…, {d})")
        # looked up in each call: they may be replaced
        parameters = [p for layer in layers for p in (layer.weight, getattr(layer, "bias", None))]
        refuse_transforms("MemoryEfficientMLP", INSTEAD, (x, *parameters))
        x_ND = x.to(dtype).reshape(-1, d)
        rows = max(1, min(len(x_ND), self.chunk_size or len(x_ND)))
        trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, *parameters))
        settings = MLPSettings(form, rows, self.keep == "hidden" and trained, self, (1,) * (x.ndim - 2),
                               torch.is_autocast_enabled(device))
        y_ND = MLPFunction.apply(settings, x_ND, *parameters)
        return y_ND.view(*x.shape[:-1], y_ND.shape[1])


def _pairs_of(model):
    """Name the first two linear layers, one after the other, of which the second has the first's sizes turned round."""
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "in_features")]
    for (one, up), (other, down) in pairwise(layers):
        d, hidden = up.in_features, up.out_features
        if d < hidden == down.in_features and d == down.out_features:
            return (f": {one}, {d} to {hidden}, and {other}, {hidden} to {d}, are called by a module that is no "
                    "feed-forward layer alone, or with more between them")
    return ""


def memory_efficient_mlps(model: nn.Module, *, keep: str = "input", chunk_size: int | None = None) -> int:
    """Replace every feed-forward layer of a model that `MemoryEfficientMLP.of` can; return how many.

    They are found by what they compute, in models of transformers, of timm, and our GPT. Parameters and state_dict stay
    the same. Raises TypeError, and replaces none, if one does more than such a layer or has hooks; ValueError if there
    is none, naming pairs of linear layers that look like one, as where a decoder layer calls them itself.
    """
    made, inside = {}, set()
    for module in model.modules():
        if isinstance(module, MemoryEfficientMLP):
            inside |= {*module.modules()}
        if module is not model and module not in inside:
            with suppress(NotFeedForward):
                made[module] = MemoryEfficientMLP.of(module, keep=keep, chunk_size=chunk_size)
                inside |= {*module.modules()}
    if not made:
        raise ValueError(f"{type(model).__name__} has no MLP that is a module of its own{_pairs_of(model)}: put "
                         "MemoryEfficientMLP(d, hidden, activation) in its place")
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:
            if child in made:
                setattr(parent, name, made[child])
    return len(made)
