"""Switch a technique on from outside: a script runs as it is, and the model that it calls is changed at its first call.

What needs another loop (micro-batches, ranks, chunks of a sequence) cannot be switched on so; of those the reading
stays a prediction.
"""

from contextlib import ExitStack

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..activations import compress_activations, offload_activations
from ..attention import flash_attention, tiled_attention
from ..checkpointing import recompute
from ..cross_entropy import without_logits
from ..known_models.attention_layers import use_attention
from ..mlp import memory_efficient_mlps
from .models import blocks_of


class Switched:
    """A context in which `on_model(model)` switches techniques on for each model that a script calls: one `name`, or
    several as "none+recompute".

    Raises ValueError for a name that is not in `SWITCHES`. `applied` counts the models; `refused` has the reason for
    each that could not be changed.
    """

    def __init__(self, name):
        self.name, self.applied, self.refused, self._stack = name, 0, [], ExitStack()
        self._names = name.split("+")
        for each in self._names:
            if each not in SWITCHES:
                raise ValueError(f"{each!r} cannot be switched on from outside: expected one of {', '.join(SWITCHES)}")

    def __enter__(self):
        if "none" in self._names:
            self._stack.callback(register_optimizer_step_post_hook(_drop_gradients).remove)
            self.applied = 1
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def on_model(self, model):
        """Switch it on for one model, at its first call."""
        if next(model.parameters(), None) is None:
            return
        for name in self._names:
            try:
                if name != "none":
                    SWITCHES[name](model, self._stack)
                    self.applied += 1
            except (TypeError, ValueError) as error:
                self.refused.append(str(error))


def _blocks(model, stack):
    blocks = [block for _, block in blocks_of(model)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no repeated blocks")
    for module in model.modules():  # a cache of keys and values would grow again in the recomputation
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
            stack.callback(setattr, config, "use_cache", True)
    stack.enter_context(recompute(blocks))


def _compressed(method):
    return lambda model, stack: stack.enter_context(compress_activations(model, method))


def _head(model, stack):
    # Not an adapter around it, which only hands the attribute on.
    causal = next((m for m in model.modules() if hasattr(type(m), "get_output_embeddings")
                   and m.get_output_embeddings() is not None), model)
    stack.callback(without_logits(causal).remove)


def _attention(model, stack):
    """Through the registry of transformers: attention without a mask, or with a causal one."""
    owner = next((m for m in model.modules() if hasattr(type(m), "set_attn_implementation")), None)
    if owner is None:
        raise ValueError(f"{type(model).__name__} takes no other attention from outside: call flash_attention in it")
    stack.callback(owner.set_attn_implementation, use_attention(owner, _attend)[1])


def _attend(module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, **others):
    if attention_mask is not None:
        raise ValueError("attention_mask: attention in tiles takes causal attention or none; pad at the end of rows")
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    attention = flash_attention if query.is_cuda else tiled_attention  # Triton's interpreter is none for a training
    out = attention(query, key, value, causal=causal, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _autocast(model, stack):
    device = next(model.parameters()).device.type
    stack.enter_context(torch.autocast(device, torch.bfloat16))


def _drop_gradients(optimizer, args, kwargs):
    """After a step: what `zero_grad()` does where it comes first in the next one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


SWITCHES = {
    "none": None, "recompute": _blocks, "masks": _compressed("lossless"), "bf16": _compressed("bf16"),
    "int8": _compressed("int8"), "logits": _head, "attention": _attention, "autocast": _autocast,
    "mlp": lambda model, stack: memory_efficient_mlps(model),
    "host": lambda model, stack: stack.enter_context(offload_activations(model)),
}
