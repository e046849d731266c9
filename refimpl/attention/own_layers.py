"""An attention that has parameters, for each layer of a model its own."""

from collections.abc import Callable

from torch import nn

from ..model import Attention


def in_each_layer(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Let each attention of our GPT use what `make()` returns for it, in place; returns the model.

        in_each_layer(model, lambda: NativeSparseAttention(model.config.head_dim))

    `GPT(config, attention=module)` gives all layers one module, whose parameters they share. Call it before the
    optimizer is made: parameters are new, in the dtype and on the device of the layer that they are in.

    ValueError for a model without such a layer, or with a dropout that the attention does not have.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no refimpl.model.Attention: expected our GPT, or a part of it")
    for layer in layers:
        layer.set_attention(make().to(layer.qkv.weight))
    return model
