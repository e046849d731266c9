"""One step of a pipeline on a rank: each instruction, with what arrives before it and leaves after it."""

import contextlib

import torch

from ..ground.spans import computing
from .batches import weights_of
from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT

SPANS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}  # in a timeline


class Step:
    """Runs the instructions of one step. `loss`: the sum of the scaled losses so far, on the last stage's rank.

    `inputs`, `targets`: of each micro-batch, a tuple of tensors, on the ranks of the first and of the last stage.
    `trains`: whether forwards make graphs.
    """

    def __init__(self, pipe, inputs, targets, mailbox, trains=True):
        self.pipe, self.inputs, self.targets, self.mailbox, self.trains = pipe, inputs, targets, mailbox, trains
        self.loss = None
        self.weights = None if targets is None else weights_of(targets, pipe.count, pipe.total)
        self._in_flight = {}  # (stage, micro-batch) -> (what came in, ends of its graph), until FULL or B
        self._parts = {}  # (stage, micro-batch) -> Parts of its leaf modules, until W

    def take(self, turn, is_last):
        """Run one instruction, with the messages around it. `is_last`: no later one adds to its stage's gradients."""
        kind, stage, k = turn.instruction
        arrived = self.mailbox.receive(turn)
        with computing(SPANS[kind], f"{stage}.{k}"):
            made = self._run(kind, stage, k, arrived, is_last)
        del arrived  # it goes before what was made leaves
        if turn.makes is not None:
            self.mailbox.send(turn, made)

    def _run(self, kind, stage, k, arrived, is_last):
        if kind == FORWARD:
            return self._forward(stage, k, arrived)
        if kind == WEIGHT:
            return self._weights_backward(stage, k)
        return self._backward(kind, stage, k, arrived, is_last)

    def _forward(self, stage, k, arrived):
        """Return the outputs of a stage; keep the ends of its graph."""
        is_last = stage == self.pipe.schedule.stages - 1
        x = self.inputs[k] if stage == 0 else self._leaves(stage, k, arrived)
        with torch.set_grad_enabled(self.trains), self._recording(stage, k):
            out = self._loss(stage, k, x) if is_last else self.pipe.call(stage, *x)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        if self.trains:
            self._in_flight[stage, k] = x, [torch.autograd.graph.get_gradient_edge(y) for y in out if y.requires_grad]
        return out

    def _loss(self, stage, k, x):
        """Return a micro-batch's part of the batch's loss. A mean over no targets is NaN, and its part is 0."""
        loss = self.pipe.call(stage, *x, *self.targets[k]) if self.pipe.loss is None else (
            self.pipe.loss(self.pipe.call(stage, *x), *self.targets[k]))
        loss, weight = one_number(loss), self.weights[k]
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss

    def _leaves(self, stage, k, arrived):
        """Return what arrived as the begin of a graph."""
        return [x.detach().requires_grad_(needs_gradient and self.trains)
                for x, (_, needs_gradient, _) in zip(arrived, self.mailbox.shapes[stage, k], strict=True)]

    def _recording(self, stage, k):
        """Return a context for a forward, and its backward; it keeps the parts of one that is divided."""
        if stage not in self.pipe.splits:
            return contextlib.nullcontext()
        divided = (stage, k) in self.pipe.divided
        return self.pipe.splits[stage].recording(self._parts.setdefault((stage, k), []) if divided else None)

    def _backward(self, kind, stage, k, arrived, is_last):
        """Return the gradients of what the stage received."""
        x, ends = self._in_flight.pop((stage, k))
        if ends:
            with self._recording(stage, k):
                self.pipe.backward(stage, ends, arrived, is_last and kind == BACKWARD)
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in x if each.requires_grad]

    def _weights_backward(self, stage, k):
        parts = self._parts.pop((stage, k))
        while parts:
            parts.pop().weights_backward()


def one_number(loss):
    """Return `loss` without dimensions. TypeError or ValueError unless it is one number."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the last stage's loss is of type {type(loss).__name__}: expected a tensor of one number")
    if loss.numel() != 1:
        raise ValueError(f"the last stage's loss has shape {tuple(loss.shape)}: expected one number, the mean over the "
                         "micro-batch's targets. If that stage returns an output, give loss=")
    return loss.reshape(())
