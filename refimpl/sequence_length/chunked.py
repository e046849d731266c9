"""Training on a long sequence in chunks, so that memory holds the activations and logits of one chunk at a time.

Attention is causal. To compute a chunk, only the keys and values of the chunks before it are needed:

    forward     chunk 1, 2 … n: each chunk stores its keys and values. Its activations are freed.
    backward    chunk n … 2, 1: each chunk runs again, now with its graph. The gradients of its keys and values come
                from itself and from all later chunks, so they are complete when its own turn comes.

The result is the gradient of the whole sequence. It is recomputation over time instead of over depth. "Training Deep
Nets with Sublinear Memory Cost" (Chen et al. 2016), section 5, does this for recurrent networks; here the carried state
is the keys and values.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from numbers import Integral

import torch

from ..common.rerun import Environment
from .carried_keys import Carried

GRADIENTS = ("full", "truncated")


class ChunkedSequenceProcessor:
    """Feeds sequences to a `refimpl.model.GPT` in chunks of `chunk_size` tokens, carrying keys, values and positions.

        process = ChunkedSequenceProcessor(model, 512)
        loss = process(tokens, targets)         # in place of model(tokens, targets)
        loss.backward()

        for logits in process.logits(tokens):   # (B, up to 512, V), one chunk after the other
            …

    Loss, gradients and logits equal those of the whole sequence, up to the order of summation. The last chunk may be
    shorter. A sequence that fits in one chunk is an ordinary forward and backward. The peak is predicted by
    `chunked_step_bytes`. The cost is one more forward of every chunk but the last.

    - `gradient="truncated"`: treats the keys and values of earlier chunks as constants, as truncated backpropagation
      through time does. The loss stays the same, but the gradient differs: a chunk gets no gradient from later chunks.
      The gradients of keys and values are then not allocated.

    Gradients are added to `.grad` once per chunk, so a hook on a parameter sees each chunk's share.
    `torch.autograd.grad` is refused. A recomputation uses the random numbers and the autocast state of its forward.
    Dropout draws different masks than it would for the whole sequence. If backward fails, every `.grad` is set to None,
    since a partial sum is not a gradient. The model is patched only during a call, so calls must not overlap.

    Raises RuntimeError if parameters, tokens, targets or the model's training mode change between forward and the end
    of backward, which runs the chunks again, and for `create_graph=True`.

    Raises TypeError for a model that is not a GPT. Raises ValueError for a `chunk_size` that is not an integer of at
    least 1, for an unknown `gradient`, for an attention module that several blocks share, and for an attention function
    that has neither the option `causal` nor, as that of `attention.sparse`, a causal mask of its own: a chunk has more
    keys than queries, and its mask must be aligned bottom-right (the last query sees every key). A function that aligns
    `causal` top-left, as torch's `is_causal` does, raises ValueError in the second chunk;
    `scaled_dot_product_attention` itself is accepted and gets a mask. Tokens and targets are checked as in the model.
    """

    def __init__(self, model: torch.nn.Module, chunk_size: int, *, gradient: str = "full") -> None:
        if not hasattr(model, "blocks") or not hasattr(model, "config"):
            raise TypeError(f"ChunkedSequenceProcessor({type(model).__name__}, …): expected a refimpl.model.GPT, whose "
                            "attention can be given the keys of earlier chunks")
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral) or chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens")
        if gradient not in GRADIENTS:
            raise ValueError(f"gradient={gradient!r}: expected 'full' or 'truncated'")
        for block in model.blocks:
            causal = {"causal", "is_causal"} & {*block.attention.options}
            if not causal and getattr(block.attention.attention, "chunk", None) is None:
                raise ValueError(f"attention {block.attention.attention} has no option causal: a chunk has more keys "
                                 "than queries, so its mask is not the whole sequence's. Use an attention with that "
                                 "option, such as softmax_attention")
        if len({block.attention for block in model.blocks}) < len(model.blocks):
            raise ValueError("several blocks of this model share one attention module: each block carries its own keys "
                             "and values, so give each its own module (parameters may be shared)")
        self.model, self.chunk_size, self.gradient = model, int(chunk_size), gradient

    def __repr__(self):
        return f"ChunkedSequenceProcessor({type(self.model).__name__}, {self.chunk_size}, gradient={self.gradient!r})"

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """Return the chunks of a sequence of `length` tokens: [(first, last), …], `last` excluded."""
        return [(first, min(first + self.chunk_size, length)) for first in range(0, length, self.chunk_size)]

    def logits(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of each chunk, (B, T, V), without a graph.

        Drop each before you ask for the next: then only one chunk's logits are in memory.
        """
        length = self.model._check(tokens, None, 0)
        carried = Carried(self.model, *tokens.shape)
        for first, last in self.chunks(length):
            with torch.no_grad(), carried.chunk(first, last, store=True):  # a decorator would hold the logits
                logits = self.model(tokens[:, first:last], offset=first)
            yield logits
            del logits

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the whole sequence, as `model(tokens, targets)` does; backward runs in chunks."""
        length = self.model._check(tokens, targets, 0)
        if targets is None:
            raise TypeError("targets=None: expected a tensor (B, T); for logits, ask process.logits(tokens)")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if length <= self.chunk_size:
            return self.model(tokens, targets)
        one_pass = _ChunkedPass(self, tokens, targets, trained if torch.is_grad_enabled() else [])
        if not one_pass.trained:
            return one_pass.forward()
        # Not parameters with hooks: autograd would call the hooks once more, without a gradient.
        free = [p for p in trained if not p._backward_hooks and not p._post_accumulate_grad_hooks]
        return _ChunkedLoss.apply(one_pass, *(free or [torch.empty(0, requires_grad=True)]))


class _ChunkedLoss(torch.autograd.Function):
    """Runs forward and backward of all chunks as one autograd node. `anchors` require a gradient, so that backward is
    called."""

    @staticmethod
    def forward(ctx, one_pass, *anchors):
        ctx.one_pass = one_pass
        return one_pass.forward()

    @staticmethod
    def backward(ctx, gradient):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a loss of ChunkedSequenceProcessor adds gradients to .grad: call loss.backward() "
                               "without inputs=, and not torch.autograd.grad")
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True for a loss of ChunkedSequenceProcessor: its gradients have no graph. "
                               "For second derivatives, call model(tokens, targets)")
        one_pass, ctx.one_pass = ctx.one_pass, None
        if one_pass is None:
            raise RuntimeError("backward a second time through a loss of ChunkedSequenceProcessor: compute the loss "
                               "again")
        one_pass.backward(gradient)
        return None, *(None for _ in ctx.needs_input_grad[1:])


class _ChunkedPass:
    """Runs forward and backward of one sequence in chunks. `trained`: the parameters that get gradients."""

    def __init__(self, process, tokens, targets, trained):
        self.model, self.tokens, self.targets, self.trained = process.model, tokens, targets, trained
        self.chunks, self.truncated = process.chunks(tokens.shape[1]), process.gradient == "truncated"
        self.carried = Carried(process.model, *tokens.shape)
        self.count = (targets != -100).sum()
        self.environments = []  # of all chunks but the last
        self.found = self._condition()

    def _condition(self):
        """Return what must not change until backward: each tensor's version counter, and each module's mode."""
        tensors = [self.tokens, self.targets, *self.model.parameters(), *self.model.buffers()]
        # Inference tensors have no counter.
        return ([None if tensor.is_inference() else tensor._version for tensor in tensors],
                [module.training for module in self.model.modules()])

    def _check_condition(self):
        """Raise RuntimeError if a tensor was changed in place, or a module's mode, since forward."""
        for before, now, what in zip(self.found, self._condition(), (
                "a parameter, tokens or targets were changed in place (by an optimizer that steps in backward?)",
                "model.train() or eval() was called"), strict=True):
            if before != now:
                raise RuntimeError(f"{what} between a forward of ChunkedSequenceProcessor and the end of its backward, "
                                   "which runs the chunks again: do it after backward")

    def forward(self):
        """Return the loss, without a graph. The last chunk's graph is kept, since backward begins there."""
        loss = 0.0
        for first, last in self.chunks:
            again = bool(self.trained) and last < self.tokens.shape[1]
            if again:
                self.environments.append(Environment(self.model, [self.tokens]))
            with torch.set_grad_enabled(bool(self.trained) and not again):
                self.last = self._loss(first, last, store=True)  # of the last chunk alone it has a graph
            if again:
                self.environments[-1].drop_unused()
            loss = loss + self.last.detach()
        return loss

    def _loss(self, first, last, store):
        """Return one chunk's share of the mean loss."""
        with self.carried.chunk(first, last, store):
            part = self.tokens[:, first:last], self.targets[:, first:last]
            return self.model(*part, offset=first, reduction="sum") / self.count

    def backward(self, gradient):
        """Add the gradient to `.grad`, chunk by chunk, from the last to the first."""
        if not self.truncated:
            self.carried.allocate_gradients()
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
