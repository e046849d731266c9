"""Runs any schedule on real ranks: each rank computes its stages in the schedule's order, and the rest follows.

A stage's forward gives the next one a tensor that has no graph; its backward begins with the gradient that comes back.
So a micro-batch is in flight on a rank from its forward until its backward. The graph is all that is kept then:

    F       x arrives; y = stage(x); y leaves, and its graph stays
    FULL    dy arrives; the stage's backward, from the graph's end; dx leaves
    B, W    the same in two parts (`split`)

The loss is the mean over the batch. Micro-batch k has n_k of its n targets, so its own mean loss L_k is scaled once, on
the last stage, before its backward begins: L = Σ n_k / n · L_k. Gradients then add up to those of the whole batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..common.materializing import build
from ..common.spans import computing
from ..model import GPT
from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT
from .mailbox import Mailbox
from .messages import route, route_forwards
from .micro_batches import check_batch, cut, weights_of
from .named_schedules import schedule as schedule_of
from .partition import partition
from .same_schedule import check_stages
from .split import SplitBackward
from .tied import Ties, shared
from .validate import validate

if TYPE_CHECKING:
    from ..comm.communicator import Communicator
    from .instructions import Schedule

SPANS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}  # in a timeline


def pipeline(model: torch.nn.Module, comm: "Communicator", schedule: "Schedule | str" = "1f1b",
             micro_batches: int | None = None, *, chunks: int | None = None, style: str = "parameters",
             example: Any = None, initialize: Callable[[torch.nn.Module], Any] | None = None, loss: Any = None,
             count: Any = None) -> "PipelineParallelStage":
    """Divide a model over the ranks of `comm`. Returns this rank's PipelineParallelStage.

    - `model`: what `partition` takes, the same on all ranks. On the meta device, a rank builds its own stages alone,
      with `initialize`, by default the model's own function. Else the rank's stages move to `comm.device`.
    - `schedule`: a name of `named_schedules.BUILDERS`, with `micro_batches`, and `chunks` if a rank has several stages;
      or a Schedule.
    - `style`, `example`: see `partition`. `loss`, `count`: see PipelineParallelStage.

    ValueError and TypeError as there.
    """
    if isinstance(schedule, str):
        schedule = schedule_of(schedule, comm.world_size, micro_batches, chunks)  # "1f1b": that of `schedules`
    stages = partition(model, schedule.stages, style, example=example)
    ties = shared(stages)
    mine = {s: stages[s] for s in schedule.stages_of(comm.rank)}
    if initialize is None:
        initialize = model.initialize if isinstance(model, GPT) else getattr(model, "_init_weights", None)
    del stages, model  # what other ranks have is freed before this one's is built
    build(mine.values(), comm.device, initialize)
    mine = {s: stage.to(comm.device) for s, stage in mine.items()}
    return PipelineParallelStage(mine, comm, schedule, loss=loss, count=count, tied=ties)


class PipelineParallelStage:
    """Trains this rank's stages of a model, as a Schedule says. All ranks of `comm` make one together.

    - `stages`: {number of a stage: module} of this rank, those of `schedule.stages_of(comm.rank)`. Stage 0 is called
      with the inputs, any other with what the one before returned, a tensor or several; the last one also with the
      targets, and returns the mean loss of a micro-batch. In place of a module, an engine may train a stage
      (`forward`, `backward(output, gradient)`, `no_sync`) under a schedule whose backwards are whole.
    - `loss`: `loss(output, *targets)`, if the last stage returns an output in place of the loss.
    - `count`: `count(*targets)`, the number of terms in that mean. By default what the last stage's `count_targets`
      says if it has one, else integers other than −100, or all numbers.
    - `total`: returns what losses are divided by, from the number of this rank's terms (`micro_batches.weights_of`).
    - `tied`: [{stage: name of a parameter there}] of what stages share (`tied.shared`).
    - `region`: returns a context that forwards run in, such as autocast. `scale`: returns what the loss's gradient
      begins with, in place of 1: of a loss scaler.

    Gradients are in the parameters' `.grad`: make an optimizer of `parameters()`. Raises ScheduleError for a schedule
    that cannot run, ValueError for stages that it does not have here, or that have other dtypes on other ranks.
    """

    def __init__(self, stages: Any, comm: "Communicator", schedule: "Schedule", *, loss: Any = None, count: Any = None,
                 total: Any = None, tied: Any = (), region: Callable[[], Any] = contextlib.nullcontext,
                 scale: Callable[[], float] | None = None) -> None:
        validate(schedule)  # a circle of waits is named here, before ranks hang in it
        self.stages, self.comm, self.schedule, self.loss = dict(stages), comm, schedule, loss
        modules = {s: getattr(stage, "model", stage) if is_engine(stage) else stage for s, stage in stages.items()}
        check_stages(modules, comm, schedule)
        self._turns = route(schedule, comm.rank)
        self._messages = comm.for_messages()
        self._shapes = {}  # of a batch -> of its messages
        self._expected = None
        self._ends = {turn.instruction[1]: i for i, turn in enumerate(self._turns)}  # of each stage
        self.divided = {turn.instruction[1:] for turn in self._turns if turn.instruction.kind == INPUT}
        for s in {s for s, _ in self.divided}:
            if is_engine(stages[s]):
                raise TypeError(f"stage {s} is trained by {type(stages[s]).__name__}, and schedule {schedule.name} "
                                "divides its backward: expected a schedule whose backwards are whole, as 1f1b")
        self.splits = {s: SplitBackward(module) for s, module in modules.items() if not is_engine(stages[s])}
        self._ties = Ties(tied, modules, comm, schedule.rank_of)
        self.count = count or getattr(modules.get(schedule.stages - 1), "count_targets", None)
        self.total, self.region, self.scale = total, region, scale

    def expect(self, shapes: Any) -> None:
        """Set the shapes that stages receive, for a dry run, in which no other rank sends any: {(stage, micro-batch):
        [(dtype, whether it needs a gradient, shape) of each tensor]}."""
        self._expected = dict(shapes)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this rank's stages, each once."""
        found = {p: None for stage in self.stages.values() for p in getattr(stage, "model", stage).parameters()}
        return iter(found)

    def train_step(self, inputs: Any = None, targets: Any = None) -> Any:
        """Run the forward and backward of a batch. Gradients are added to the parameters' `.grad`.

        `inputs`, `targets`: a tensor, or a tuple of tensors, with the rows in their first dimension. The rank of the
        first stage needs the inputs, that of the last one the targets. Returns the mean loss of the batch on the rank
        of the last stage, None on the others. ValueError, on all ranks, for a batch that is missing, differs in rows
        between ranks, or has fewer rows than micro-batches.
        """
        first, last, m = 0 in self.stages, self.schedule.stages - 1 in self.stages, self.schedule.micro_batches
        key = check_batch(self.comm, self.schedule, first, last, inputs, targets)
        known = key in self._shapes or self._expected is not None
        shapes = self._shapes.setdefault(key, self._expected or {})
        mailbox = Mailbox(self._messages, shapes, known, self.comm.device)
        runner = InstructionRunner(self, cut(inputs, m) if first else None, cut(targets, m) if last else None, mailbox)
        self._ties.begin()
        for i, turn in enumerate(self._turns):
            runner.run(turn, i == self._ends[turn.instruction[1]])
        mailbox.finish()
        self._ties.end()
        return runner.loss

    @torch.no_grad()
    def evaluate(self, inputs: Any = None, targets: Any = None) -> Any:
        """Return the mean loss of a batch as `train_step` does, without gradients: stages compute in eval mode,
        forwards alone, one micro-batch after the other. Arguments and errors are `train_step`'s. All ranks call it.
        """
        first, last, m = 0 in self.stages, self.schedule.stages - 1 in self.stages, self.schedule.micro_batches
        check_batch(self.comm, self.schedule, first, last, inputs, targets)
        shapes = dict(self._expected or {})
        mailbox = Mailbox(self._messages, shapes, self._expected is not None, self.comm.device)
        runner = InstructionRunner(self, cut(inputs, m) if first else None, cut(targets, m) if last else None, mailbox,
                                   trains=False)
        units = [getattr(unit, "model", unit) for unit in self.stages.values()]
        modes = {module: module.training for unit in units for module in unit.modules()}
        try:
            for module in modes:
                module.training = False
            for turn in route_forwards(self.schedule, self.comm.rank):
                runner.run(turn, False)
            mailbox.finish()
        finally:
            for module, training in modes.items():
                module.training = training
        return runner.loss

    def call(self, stage: int, *args: Any) -> Any:
        """Run a stage's forward on these arguments."""
        unit = self.stages[stage]
        return unit.forward(*args) if is_engine(unit) else unit(*args)

    def backward(self, stage: int, ends: Any, gradients: Any, is_last: bool) -> None:
        """Run a stage's backward. An engine reduces gradients in the last one of a step alone."""
        unit = self.stages[stage]
        if not is_engine(unit):
            torch.autograd.backward(ends, gradients)
            return
        with contextlib.nullcontext() if is_last else unit.no_sync():  # one reduction a step
            unit.backward(ends, gradients)


def is_engine(unit):
    """Tell whether a stage is trained by an engine, which computes its gradients itself."""
    return not isinstance(unit, torch.nn.Module)


# --- one step: each instruction, with what arrives before it and leaves after it ------------------------------------


class InstructionRunner:
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

    def run(self, turn, is_last):
        """Run one instruction, with the messages around it. `is_last`: no later one adds to its stage's gradients."""
        kind, stage, k = turn.instruction
        arrived = self.mailbox.receive(turn)
        with computing(SPANS[kind], f"{stage}.{k}"):
            made = self._compute(kind, stage, k, arrived, is_last)
        del arrived  # it goes before what was made leaves
        if turn.makes is not None:
            self.mailbox.send(turn, made)

    def _compute(self, kind, stage, k, arrived, is_last):
        if kind == FORWARD:
            return self._forward(stage, k, arrived)
        if kind == WEIGHT:
            return self._weights_backward(stage, k)
        return self._backward(kind, stage, k, arrived, is_last)

    def _forward(self, stage, k, arrived):
        """Return the outputs of a stage; keep the ends of its graph."""
        is_last = stage == self.pipe.schedule.stages - 1
        x = self.inputs[k] if stage == 0 else self._leaves(stage, k, arrived)
        with torch.set_grad_enabled(self.trains), self._recording(stage, k), self.pipe.region():
            out = self._loss(stage, k, x) if is_last else self.pipe.call(stage, *x)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        if self.trains:
            # An edge keeps the graph, and not y, whose memory is free once it has been sent.
            self._in_flight[stage, k] = x, [torch.autograd.graph.get_gradient_edge(y) for y in out if y.requires_grad]
        return out

    def _loss(self, stage, k, x):
        """Return a micro-batch's part of the batch's loss. A mean over no targets is NaN, and its part is 0."""
        loss = self.pipe.call(stage, *x, *self.targets[k]) if self.pipe.loss is None else (
            self.pipe.loss(self.pipe.call(stage, *x), *self.targets[k]))
        loss, weight = one_number(loss), self.weights[k]
        if self.pipe.scale is not None:
            loss = loss.float()  # a scale that fp16 cannot hold is what its gradient begins with
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0  # times 0 NaN stays NaN
        # On the device: no rank waits for a number.
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss

    def _leaves(self, stage, k, arrived):
        """Return what arrived as the begin of a graph."""
        return [x.detach().requires_grad_(needs_gradient and self.trains)  # a graph ends at its rank
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
        if self.pipe.scale is not None and stage == self.pipe.schedule.stages - 1:
            arrived = [torch.full((), self.pipe.scale(), device=self.loss.device)]
        if ends:
            with self._recording(stage, k):
                self.pipe.backward(stage, ends, arrived, is_last and kind == BACKWARD)
        # The stage before waits for a gradient, used or not.
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in x if each.requires_grad]

    def _weights_backward(self, stage, k):
        parts = self._parts.pop((stage, k))
        while parts:  # each part frees its x and dy before the next adds
            parts.pop().weights_backward()


def one_number(loss):
    """Return `loss` without dimensions. TypeError or ValueError unless it is one number."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the last stage's loss is of type {type(loss).__name__}: expected a tensor of one number")
    if loss.numel() != 1:
        raise ValueError(f"the last stage's loss has shape {tuple(loss.shape)}: expected one number, the mean over the "
                         "micro-batch's targets. If that stage returns an output, give loss=")
    return loss.reshape(())
