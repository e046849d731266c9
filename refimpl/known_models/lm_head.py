"""Where a causal model of transformers has its head, and what it does between its head and its loss.

Some models change logits between head and loss: Gemma caps them, Cohere and Granite scale them. Each element is changed
by itself, so the change can be read off: the hidden states that took the logits' place went through it, too. What the
loss is given is held against what the model's configuration says, and a model that does anything else is refused.
"""

import functools
import inspect
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..common.nested_tensors import is_dry

# What configurations call a factor on the logits, and its power: Cohere's, Granite's, Falcon-H1's.
FACTORS = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
SOFTCAP = "final_logit_softcapping"  # Gemma's
SAMPLE = 64  # rows that are compared


def head_of(model):
    """Return (the model, without adapters around it; its head, whose input its loss can be given in place of logits).
    Raises what `without_logits` does for others."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        raise TypeError(f"{type(model).__name__} has {type(head).__name__} as its output embedding: expected an "
                        "nn.Linear, whose weight the loss can take in place of its output")
    if "forward" in vars(head):
        raise ValueError(f"the head of this {type(model).__name__} has another forward already, its loss was replaced "
                         "before: remove() that first")
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", None) != "ForCausalLMLoss" or getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"the loss_function of {type(model).__name__} is {loss!r}: expected a decoder with "
                        "transformers' ForCausalLMLoss, which predicts each next token; for another loss, call "
                        "chunked_linear_cross_entropy in the model's forward")
    if not any("loss_function" in _names(kind) for kind in type(model).__mro__):
        raise TypeError(f"the forward of {type(model).__name__} does not call its loss_function: its loss cannot be "
                        "replaced from outside. Call chunked_linear_cross_entropy in its forward")
    return model, head


def _names(kind):
    """Return the names that the forward of a class reads, behind whatever decorators."""
    forward = inspect.unwrap(vars(kind).get("forward", lambda: None))
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def loss_by(model, score):
    """Return a function to put in the place of a model's `loss_function`, which calls `score(logits, targets,
    ignore_index, reduction)`; None for a model that has no such place."""
    known = hasattr(type(model), "loss_function") or "loss_function" in vars(model)
    return functools.partial(_next_token_loss, score) if known else None


def _next_token_loss(score, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100,
                     shift_labels=None, **others):
    """Score the next token, as transformers' ForCausalLMLoss does."""
    if shift_labels is None:  # each token predicts the next; the last one predicts none
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = score(logits, shift_labels.to(logits.device), ignore_index, "mean" if num_items_in_batch is None else "sum")
    if isinstance(num_items_in_batch, torch.Tensor):  # it may be on another device than the loss
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Change(NamedTuple):
    """What a model does to its logits: first a factor, then a softcap."""

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def said(cls, config):
        """Return what a model's configuration says."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = 1.0
        for name, power in FACTORS.items():
            factor *= (getattr(config, name, None) or 1.0) ** power
        return cls(factor, getattr(config, SOFTCAP, None))

    def of(self, x):
        """Return x, changed, in fp32 or, of fp64, in that."""
        x = _wide(x) * self.factor
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

    def error(self, hidden, found):
        """Return how far `found` is from hidden, changed: the largest error, in units of its dtype's rounding. Of a
        number below the dtype's smallest normal one, that the model divided by its softcap, that is the rounding."""
        kinds = [torch.finfo(x.dtype) for x in (hidden, found)]
        rounding, smallest = max(kind.eps for kind in kinds), max(kind.smallest_normal for kind in kinds)
        found = _wide(found)
        near_0 = smallest * max(1.0, self.softcap or 1.0)
        return ((self.of(hidden) - found).abs() / (rounding * found.abs().clamp(min=near_0))).max().item()


def changed(model, hidden, found):
    """Return the Change that makes `found` of hidden: what the configuration says, a part of that, or none.
    RuntimeError if it is another one.

    In 16 bits a softcap may move small numbers by less than their rounding. So what the configuration says is believed
    wherever it fits, also if less of it fits better, unless nothing has moved.
    """
    said = Change.said(model.config)
    if is_dry(hidden) or not hidden.numel():
        return said if found is not hidden else Change()
    parts = dict.fromkeys([said, Change(said.factor), Change(1.0, said.softcap), Change()])
    if found.shape == hidden.shape:
        hidden, found = (x.detach().reshape(-1, x.shape[-1])[:SAMPLE] for x in (hidden, found))
        if hidden.any() and torch.equal(_wide(hidden), _wide(found)):
            return Change()
        fits = next((change for change in parts if change.error(hidden, found) <= 8), None)
        if fits is not None:
            return fits
    raise RuntimeError(f"{type(model).__name__} changes its logits between head and loss, and not as its config says "
                       f"({said}): expected a factor ({', '.join(FACTORS)}), a softcap ({SOFTCAP}) or neither. Call "
                       "chunked_linear_cross_entropy in its forward")


def _wide(x):
    """Return x in fp32, or as it is if that is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
