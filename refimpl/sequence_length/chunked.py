"""A long sequence in chunks: of activations and logits there are those of one chunk.

Attention is causal, so a chunk needs of earlier ones only their keys and values:

    forward     chunk 1, 2 … n: each adds its keys and values; nothing else of it stays
    backward    chunk n … 2, 1: each runs again, with its graph; the gradients of keys and values are summed over the
                later chunks, and complete when their own chunk's turn comes

The gradient is that of the whole sequence. This is recomputation over time in place of depth, as in "Training Deep Nets
with Sublinear Memory Cost" (Chen et al. 2016), section 5, for recurrent networks, where keys and values are the state.
"""

from contextlib import nullcontext
from numbers import Integral

import torch

from ..memory.rerun import Environment
from .cache import Carried

GRADIENTS = ("full", "truncated")


class ChunkedSequenceProcessor:
    """Feeds sequences to a `refimpl.model.GPT` in chunks of `chunk_size` tokens, carrying keys, values and positions.

        process = ChunkedSequenceProcessor(model, 512)
        loss = process(tokens, targets)         # in place of model(tokens, targets)
        loss.backward()

        for logits in process.logits(tokens):   # (B, up to 512, V), one chunk after the other
            …

    Loss, gradients and logits are those of the whole sequence, up to the order in which sums are taken. The last chunk
    has what is left; a sequence of one chunk is a plain pass. Peak: `chunked_step_bytes`. It costs the forward of all
    chunks but the last once more.

    - `gradient="truncated"`: keys and values of earlier chunks are constants. No chunk learns from what later ones read
      of it: the loss is the same and the gradient is another, as in truncated backpropagation through time. It takes
      no gradients of keys and values.

    Gradients go straight to `.grad` (`torch.autograd.grad` through it is refused), once for each chunk: a hook on a
    parameter sees each chunk's share. Random numbers and autocast in a recomputation are those of its forward; dropout
    draws other masks than for the whole sequence. If a backward fails, every `.grad` is None, as half a sum is
    nothing's gradient. Nothing is patched outside of a call; one call at a time.

    Chunks run again in backward, so until it ends parameters, tokens, targets and the model's mode must be what they
    were in forward: else it is a RuntimeError. So is `create_graph=True`.

    TypeError for a model that is no GPT; ValueError for a `chunk_size` that is no integer of at least 1, an unknown
    `gradient`, an attention that several blocks share, and an attention function that takes no `causal`: of a chunk's
    queries the last must see every key (bottom-right), which it could not be told. One that takes `causal` and aligns
    it top-left, as `scaled_dot_product_attention` does, is a ValueError in the second chunk. Tokens and targets are
    checked as the model does.
    """

    def __init__(self, model, chunk_size, *, gradient="full"):
        if not hasattr(model, "blocks") or not hasattr(model, "config"):
            raise TypeError(f"ChunkedSequenceProcessor({type(model).__name__}, …): expected a refimpl.model.GPT, whose "
                            "attention can be given the keys of earlier chunks")
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral) or chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens")
        if gradient not in GRADIENTS:
            raise ValueError(f"gradient={gradient!r}: expected 'full' or 'truncated'")
        for block in model.blocks:
            if not {"causal", "is_causal"} & {*block.attention.options}:
                raise ValueError(f"attention {block.attention.attention} takes no causal: a chunk's mask is another "
                                 "than the sequence's; use one with that option, as softmax_attention has")
        if len({block.attention for block in model.blocks}) < len(model.blocks):
            raise ValueError("blocks of this model share an attention: each carries keys and values of its own, so "
                             "each needs its own module (parameters may be shared)")
        self.model, self.chunk_size, self.gradient = model, int(chunk_size), gradient

    def __repr__(self):
        return f"ChunkedSequenceProcessor({type(self.model).__name__}, {self.chunk_size}, gradient={self.gradient!r})"

    def chunks(self, length):
        """[(first, last), …] of a sequence of `length` tokens."""
        return [(first, min(first + self.chunk_size, length)) for first in range(0, length, self.chunk_size)]

    def logits(self, tokens):
        """Yield the logits of each chunk, (B, T, V), without a graph. Let go of one before you ask for the next, and
        there is never more than one chunk's."""
        length = self.model._check(tokens, None, 0)
        carried = Carried(self.model, *tokens.shape)
        for first, last in self.chunks(length):
            with torch.no_grad(), carried.chunk(first, last, store=True):  # a decorator would hold what it passes on
                logits = self.model(tokens[:, first:last], offset=first)
            yield logits
            del logits

    def __call__(self, tokens, targets):
        """The mean loss of the whole sequence, as `model(tokens, targets)` gives it; its backward runs in chunks."""
        length = self.model._check(tokens, targets, 0)
        if targets is None:
            raise TypeError("targets=None: expected a tensor (B, T); for logits, ask process.logits(tokens)")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if length <= self.chunk_size:
            return self.model(tokens, targets)
        one_pass = _Pass(self, tokens, targets, trained if torch.is_grad_enabled() else [])
        if not one_pass.trained:
            return one_pass.forward()
        # With a hook, not: autograd would call it once more, with no gradient.
        free = [p for p in trained if not p._backward_hooks and not p._post_accumulate_grad_hooks]
        return _Loss.apply(one_pass, *(free or [torch.empty(0, requires_grad=True)]))


class _Loss(torch.autograd.Function):
    """A whole pass as one node. `anchors`: tensors that ask for a gradient, so that autograd calls backward."""

    @staticmethod
    def forward(ctx, one_pass, *anchors):
        ctx.one_pass = one_pass
        return one_pass.forward()

    @staticmethod
    def backward(ctx, gradient):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a loss of ChunkedSequenceProcessor adds gradients to .grad: call loss.backward() "
                               "without inputs=; torch.autograd.grad cannot be had")
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True through a loss of ChunkedSequenceProcessor: its gradients have no "
                               "graph; call model(tokens, targets) for derivatives of derivatives")
        one_pass, ctx.one_pass = ctx.one_pass, None
        if one_pass is None:
            raise RuntimeError("backward a second time through a loss of ChunkedSequenceProcessor: compute it again")
        one_pass.backward(gradient)
        return None, *(None for _ in ctx.needs_input_grad[1:])


class _Pass:
    """Forward and backward of one sequence in chunks. `trained`: the parameters that are to get gradients."""

    def __init__(self, process, tokens, targets, trained):
        self.model, self.tokens, self.targets, self.trained = process.model, tokens, targets, trained
        self.chunks, self.truncated = process.chunks(tokens.shape[1]), process.gradient == "truncated"
        self.carried = Carried(process.model, *tokens.shape)
        self.count = (targets != -100).sum()
        self.environments = []  # of all chunks but the last
        self.found = self._condition()

    def _condition(self):
        """What must be the same in backward: writes to each tensor, as autograd counts them, and each module's mode."""
        tensors = [self.tokens, self.targets, *self.model.parameters(), *self.model.buffers()]
        return ([None if tensor.is_inference() else tensor._version for tensor in tensors],
                [module.training for module in self.model.modules()])

    def _check_condition(self):
        for before, now, what in zip(self.found, self._condition(), (
                "a parameter, tokens or targets were changed in place (by an optimizer that steps in backward?)",
                "model.train() or eval() was called"), strict=True):
            if before != now:
                raise RuntimeError(f"{what} between a forward of ChunkedSequenceProcessor and the end of its backward, "
                                   "which runs the chunks again: do it after the backward")

    def forward(self):
        """The loss, without a graph. That of the last chunk stays, for backward begins with it."""
        loss = 0.0
        for first, last in self.chunks:
            again = bool(self.trained) and last < self.tokens.shape[1]
            if again:
                self.environments.append(Environment(self.model, [self.tokens]))
            with torch.set_grad_enabled(bool(self.trained) and not again):
                self.last = self._loss(first, last, store=True)
            if again:
                self.environments[-1].drop_unused()
            loss = loss + self.last.detach()
        return loss

    def _loss(self, first, last, store):
        """A chunk's share of the mean."""
        with self.carried.chunk(first, last, store):
            part = self.tokens[:, first:last], self.targets[:, first:last]
            return self.model(*part, offset=first, reduction="sum") / self.count

    def backward(self, gradient):
        """Add the gradient to `.grad`, chunk by chunk, the last first."""
        if not self.truncated:
            self.carried.need_gradients()
        try:
            for first, last in reversed(self.chunks):
                again = last < self.tokens.shape[1]
                self._check_condition()
                with self.environments.pop().restored() if again else nullcontext(), torch.enable_grad():
                    loss = self._loss(first, last, store=False) if again else self.last
                with self.carried.chunk(first, last, store=False):  # for blocks that are recomputed
                    loss.backward(gradient)
                del loss
        except BaseException:
            for parameter in self.trained:
                parameter.grad = None
            raise
