"""The chunked loss in models of transformers and in our GPT, in one call.

Our GPT has a `loss` that can be set, and gives it its head and the hidden states. A causal model of transformers
computes `logits = lm_head(hidden)` and `loss = self.loss_function(logits, labels, …)`. Both can be replaced from
outside: for a call with labels the head hands on the hidden states, and the loss function takes these with the head's
weight. The model's own forward stays, with all its options.

Some models change logits between head and loss: Gemma caps them, Cohere and Granite scale them. Each element is changed
by itself, so the change can be read off: the hidden states that took the logits' place went through it, too. What the
loss is given is held against what the model's configuration says, and a model that does anything else is refused.
"""

import inspect
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..ground.tensors import is_dry
from ..model import GPT
from .chunked import chunked_linear_cross_entropy


def without_logits(model, **options):
    """Let a model compute its loss without logits: our GPT, or a causal model of transformers. Returns a handle;
    `.remove()` undoes it.

        without_logits(model)
        loss = model(input_ids=tokens, labels=tokens).loss       # .logits is None
        logits = model(input_ids=tokens).logits                  # without labels, as before
        loss = gpt(tokens, targets)                              # our GPT, after without_logits(gpt)

    `options`: of `chunked_linear_cross_entropy`, such as `chunk_size` and `z_loss`. The model's parameters, their names
    and its state_dict stay the same, tied weights too. `num_items_in_batch`, which transformers' Trainer passes,
    divides the sum of the losses, as in theirs. Its `compute_metrics` is not called where there are no logits: remove()
    first. Its `label_smoothing_factor` keeps the labels from the model, whose logits then stay: give `label_smoothing`.

    A softcap or a factor on the logits (Gemma 2, Cohere, Granite, Falcon-H1) is taken from the model's configuration,
    and checked in the first call. The model may be peft's if its head is not adapted.

    Raises TypeError for a model without an `nn.Linear` as its output embedding or with another loss than that of the
    next token, ValueError for one whose loss has been replaced already. A call raises RuntimeError if the model does
    something else to its logits between head and loss, or if `options` and the model both have a softcap.
    """
    if isinstance(model, GPT):
        return _OfGPT(model, options)
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
    return _WithoutLogits(model, head, options)


def _names(kind):
    """Return the names that the forward of a class reads, behind whatever decorators."""
    forward = inspect.unwrap(vars(kind).get("forward", lambda: None))
    return getattr(getattr(forward, "__code__", None), "co_names", ())


# What configurations call a factor on the logits, and its power: Cohere's, Granite's, Falcon-H1's.
FACTORS = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
SOFTCAP = "final_logit_softcapping"  # Gemma's
SAMPLE = 64  # rows that are compared


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


class _OfGPT:
    """The loss of our GPT, replaced."""

    def __init__(self, model, options):
        if isinstance(getattr(model.loss, "__self__", None), _OfGPT):
            raise ValueError("the loss of this GPT has been replaced before: remove() that first")
        self.model, self.before, self.options = model, model.loss, options
        model.loss = self._loss

    def remove(self):
        """Give the model its own loss back."""
        self.model.loss = self.before

    def _loss(self, head, x_BTC, targets_BT, reduction):
        return chunked_linear_cross_entropy(x_BTC, head.weight, targets_BT, -100, head.bias, reduction, **self.options)


class _WithoutLogits:
    """What stands between a model's head and its loss. `hidden`: what the head was given in this call, or None."""

    def __init__(self, model, head, options):
        self.model, self.head, self.options = model, head, options
        self.active, self.hidden, self.called, self.change = False, None, False, None
        self.parameters = inspect.signature(model.forward)
        self.before = model.loss_function
        head.forward = self._head
        model.loss_function = self._loss
        self.hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True),
                      model.register_forward_hook(self._end, with_kwargs=True, always_call=True)]

    def remove(self):
        """Give the model its own head and loss back."""
        for hook in self.hooks:
            hook.remove()
        self.head.__dict__.pop("forward", None)
        self.model.loss_function = self.before

    def _begin(self, model, args, kwargs):
        if model is not self.model:
            raise RuntimeError(f"this {type(model).__name__} is a replica of the one given to without_logits, as "
                               "torch.nn.DataParallel makes one for each GPU: expected one process for each GPU, by "
                               "torchrun and DistributedDataParallel, or remove() this")
        given = self.parameters.bind_partial(*args, **kwargs).arguments
        self.active, self.hidden, self.called = given.get("labels") is not None, None, False

    def _head(self, hidden):
        if not self.active:
            return F.linear(hidden, self.head.weight, self.head.bias)
        self.hidden, self.version = hidden, _version(hidden)
        return hidden

    def _loss(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
              **others):
        if not self.active:
            return self.before(logits=logits, labels=labels, vocab_size=vocab_size, ignore_index=ignore_index,
                               num_items_in_batch=num_items_in_batch, shift_labels=shift_labels, **others)
        if self.hidden is None or _version(self.hidden) != self.version:
            raise RuntimeError(f"{type(self.model).__name__} writes to its logits between head and loss, or computes "
                               "them without its head: expected a loss of the head's own output. Call "
                               "chunked_linear_cross_entropy in its forward")
        self.change = self.change or changed(self.model, self.hidden, logits)
        options, factor, softcap = self.options, *self.change
        if softcap is not None and options.get("softcap") is not None:
            raise RuntimeError(f"softcap={options['softcap']!r}: {type(self.model).__name__} has its own, {softcap}; "
                               "call without_logits without one")
        hidden, self.called = self.hidden if factor == 1 else self.hidden * factor, True
        if shift_labels is None:  # each token predicts the next; the last one predicts none
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = chunked_linear_cross_entropy(
            hidden, self.head.weight, shift_labels.to(logits.device), ignore_index, self.head.bias,
            "mean" if num_items_in_batch is None else "sum", **options | ({"softcap": softcap} if softcap else {}))
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _end(self, model, args, kwargs, outputs):
        active, called, self.active, self.hidden = self.active, self.called, False, None
        if not active or outputs is None:
            return outputs
        if not called:
            raise RuntimeError(f"{type(model).__name__} was given labels and did not call its loss_function: its loss "
                               "cannot be replaced from outside. remove() this, and call chunked_linear_cross_entropy "
                               "in its forward")
        if isinstance(outputs, tuple):  # return_dict=False: (loss, logits, …)
            return (outputs[0], None, *outputs[2:])
        outputs["logits"] = None
        return outputs


def _version(x):
    """Return the number of times that x was written to; 0 in inference mode, which does not count."""
    return 0 if x.is_inference() else x._version
