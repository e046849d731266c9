"""The chunked loss in models of transformers and in our GPT, in one call.

Our GPT has a `loss` that can be set, and gives it its head and the hidden states. A causal model of transformers
computes `logits = lm_head(hidden)` and `loss = self.loss_function(logits, labels, …)`. Both can be replaced from
outside: for a call with labels the head hands on the hidden states, and the loss function takes these with the head's
weight. The model's own forward stays, with all its options. What it does between the two is read by
`known_models/lm_head`.
"""

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from ..model import GPT
from ..others import ask
from .chunked import chunked_linear_cross_entropy


def without_logits(model: torch.nn.Module, **options: Any) -> Any:
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
        return _GPTWithoutLogits(model, options)
    return _WithoutLogits(*ask("head", model), options)


class _GPTWithoutLogits:
    """What gives our GPT its own loss back."""

    def __init__(self, model, options):
        self.model, self.before = model, vars(model).get("loss")
        if isinstance(self.before, _GPTLoss):
            raise ValueError("the loss of this GPT has been replaced before: remove() that first")
        model.loss = _GPTLoss(options)

    def remove(self):
        """Give the model its own loss back."""
        del self.model.loss
        if self.before is not None:
            self.model.loss = self.before


class _GPTLoss:
    """The loss of a GPT. It does not hold the model: a stage of a pipeline has it, and the other layers are to go."""

    def __init__(self, options):
        self.options = options

    def __call__(self, head, x_BTC, targets_BT, reduction):
        return chunked_linear_cross_entropy(x_BTC, head.weight, targets_BT, -100, head.bias, reduction, **self.options)


class _WithoutLogits:
    """What stands between a model's head and its loss. `hidden`: what the head was given in this call, or None."""

    def __init__(self, model, head, options):
        self.model, self.head, self.options = model, head, options
        self.active = self.called = False  # in this call: whether there are labels, whether the loss was computed
        self.hidden = self.change = None
        self.parameters = inspect.signature(model.forward)
        self.before, self.next_token_loss = model.loss_function, ask("loss", model, self._score)
        head.forward = self._head  # on the instance: the model's own forward goes on calling its head
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
        labels = given.get("labels", given.get("targets"))  # the second, of a stage of a pipeline
        self.active, self.hidden, self.called = labels is not None, None, False

    def _head(self, hidden):
        if not self.active:
            return F.linear(hidden, self.head.weight, self.head.bias)
        self.hidden, self.version = hidden, _version(hidden)  # a write to logits in place is seen by this
        return hidden

    def _loss(self, logits, labels, *args, **options):
        return (self.next_token_loss if self.active else self.before)(logits, labels, *args, **options)

    def _score(self, logits, targets, ignore_index, reduction):
        if self.hidden is None or _version(self.hidden) != self.version:
            raise RuntimeError(f"{type(self.model).__name__} writes to its logits between head and loss, or computes "
                               "them without its head: expected a loss of the head's own output. Call "
                               "chunked_linear_cross_entropy in its forward")
        # read once: the config does not change between calls
        self.change = self.change or ask("between", self.model, self.hidden, logits)
        options, factor, softcap = self.options, *self.change
        if softcap is not None and options.get("softcap") is not None:
            raise RuntimeError(f"softcap={options['softcap']!r}: {type(self.model).__name__} has its own, {softcap}; "
                               "call without_logits without one")
        hidden, self.called = self.hidden if factor == 1 else self.hidden * factor, True
        return chunked_linear_cross_entropy(hidden, self.head.weight, targets, ignore_index, self.head.bias, reduction,
                                            **options | ({"softcap": softcap} if softcap else {}))

    def _end(self, model, args, kwargs, outputs):
        active, called, self.active, self.hidden = self.active, self.called, False, None
        if not active or outputs is None:
            return outputs
        if not called:
            raise RuntimeError(f"{type(model).__name__} was given labels and did not call its loss_function: its loss "
                               "cannot be replaced from outside. remove() this, and call chunked_linear_cross_entropy "
                               "in its forward")
        if isinstance(outputs, torch.Tensor):  # a stage returns the loss alone
            return outputs
        if isinstance(outputs, tuple):  # return_dict=False: (loss, logits, …)
            return (outputs[0], None, *outputs[2:])
        outputs["logits"] = None
        return outputs


def _version(x):
    """Return the number of times that x was written to; 0 in inference mode, which does not count."""
    return 0 if x.is_inference() else x._version
