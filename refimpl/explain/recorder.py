"""What is written down while a script runs: its trace, and who called what.

The tracker knows storages. To say what a technique would save, three facts more are needed: when a module's forward
began and ended and what it returned, whether a saved tensor wanted a gradient, and where the steps ended.
"""

import sys
import weakref
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ..common.nested_tensors import tensors_in
from ..memory.trace import Trace
from ..memory.tracker import Tracker
from ..memory.tracking import listeners
from ..memory.workspaces import with_those_of_a_log, with_unseen
from . import no_gradients
from .allocator_log import AllocatorLog
from .hand_written import HandWritten, HandWrittenSteps
from .kept import StepEnds, tensors_there
from .longest import longest_item
from .models import ModelFacts, OptimizerFacts
from .no_gradients import Recomputed
from .phases import Saving, Span, own_phase
from .rows import Rows
from .uses import Uses


@dataclass
class RecordedCall:
    """One forward of a module: its path, its first operation, the one after its last, and the records of its tensor
    arguments and of its output. `nodes`: autograd's number of its first node, and of the one after its last;
    `goes_back`: whether a backward went through what it made."""

    path: str
    begin: int
    end: int
    depth: int
    inputs: set = field(default_factory=set)
    outputs: set = field(default_factory=set)
    rows: int | None = None  # the first dimension of what it was given
    nodes: tuple = (0, 0)
    goes_back: bool = False
    sequence_first: bool = False  # that dimension is time to its module: batch_first=False
    last_saving: int = 0  # the operation before which autograd saved its last tensor of the call
    trained: bool = False  # whether its module has parameters that want gradients; of a model's call alone
    generates: bool = False  # whether a method `generate` called it; likewise


@dataclass
class ScriptRecording:
    """A trace of whole steps, with what the script's models were."""

    trace: Trace
    steps: list  # operations after which a step ended
    calls: list
    wanting: set  # records of which a saved tensor wanted a gradient
    models: list
    optimizers: list
    cuda: dict = field(default_factory=dict)  # bytes at the allocator's peak: requested, allocated, reserved
    waiting: int = 0  # parameters that want gradients, and are in no optimizer that stepped
    rows: dict = field(default_factory=dict)  # numbers of the records that grow with the rows of their batch
    why_whole: str | None = None  # why batches cannot be cut
    grows: list | None = None  # Held: what each step leaves more than the one before; None if that is not known
    kept: list = field(default_factory=list)  # Held: what outlives its step
    saving: list = field(default_factory=list)  # Spans in which it saved or loaded, or updated parameters by hand
    uses: Uses | None = None  # who read what last
    longest_item: tuple | None = None  # its tokens, and which it is, of the loaders' data
    no_gradients: int = 0  # numbers that an optimizer is to update, and that had no gradient at its first step
    recomputed: Recomputed | None = None


class ScriptRecorder:
    """A Tracker, and beside it notes of calls, steps and models. Use it as a context; `recording()` at any time.

    `on_model(module)` may change a model at its first call, before the tracker meets it. Of the program's objects it
    holds none: what the program drops must go.
    """

    def __init__(self, on_model=None):
        self._tracker, self._before = Tracker(), _Before(on_model, self) if on_model else None
        self.steps, self.calls, self.wanting, self.models, self.optimizers = [], [], set(), [], []
        self.stopped, self._cuda, self._waiting = None, {}, 0
        self._open, self._known = [], weakref.WeakSet()  # calls that run, outermost first; models and optimizers met
        self._closed = None, None  # the call that ended last
        self._counted = WeakIdKeyDictionary()  # parameters of models so far: a part that is called alone is no other
        self._updated = WeakIdKeyDictionary()  # parameters of optimizers that stepped
        self._log, self.rows = AllocatorLog(), Rows(self._tracker)
        self._uses = Uses(self._tracker)
        self.by_hand = HandWrittenSteps(self._tracker)
        self.backward_begins = self.by_hand.backward_begins
        self._tracker.on_operation = self._ran
        self._of_this_step = 0  # the first record that was made after the last step
        self._ends, self._outlived, self._longest = StepEnds(), (None, []), None
        self._saving, self._saved = Saving(self._saves), []
        self._no_gradients, self._recomputed, self.is_open = 0, Recomputed(), False

    def __enter__(self):
        self.is_open = True
        self._tracker.__enter__()
        self._saving.__enter__()
        self._uses.__enter__()
        self.by_hand.__enter__()
        self._recomputed.__enter__()
        self._log.begin()
        listeners.subscribe(self)
        if self._before:
            listeners.subscribe(self._before, first=True)
        self._hooks = [register_module_forward_pre_hook(self._given), register_module_forward_hook(self._returned)]
        return self

    def begin_late(self):
        """Write down what is alive when a recording begins behind a step of an optimizer: what no operation meets
        again nobody else would tell of."""
        self.__enter__()
        self.by_hand.optimizer_made()
        for tensor, _, beside in tensors_there():
            for each in (tensor, *beside):
                self._tracker.meet(each)

    @property
    def is_innermost(self):
        """Whether no dispatch mode has been opened since, and is open yet."""
        return _get_current_dispatch_mode_stack()[-1:] == [self._tracker]

    def __exit__(self, *exception):
        for hook in self._hooks:
            hook.remove()
        listeners.unsubscribe(self)
        if self._before:
            listeners.unsubscribe(self._before)
        self._log.end()
        self._uses.__exit__(*exception)
        self._recomputed.__exit__(*exception)
        self.by_hand.__exit__(*exception)
        self._saving.__exit__(*exception)
        self._tracker.__exit__(*exception)

    @contextmanager
    def _saves(self, phase):
        begin = len(self._tracker.ops)
        try:
            yield
        finally:
            self._saved.append(Span(phase, begin, len(self._tracker.ops)))

    def _ran(self, func, args, kwargs, outputs):
        if self.stopped is None:
            self.rows.follow(func, args, kwargs, outputs)
            self._uses.follow(func, args, kwargs, outputs)
        if not self._open:
            self.by_hand.follow(func, args, kwargs)

    def enter_module(self, module):
        """Note the call, and at a model's first call what it is."""
        outermost = self.is_outermost()
        if outermost:
            self.by_hand.model_called()
        call = RecordedCall(self._tracker.path_of(module), len(self._tracker.ops), -1, len(self._open) + 1)
        call.nodes = torch._C._autograd._get_sequence_nr(), 0
        self._open.append((weakref.ref(module), call))
        if outermost and module not in self._known:
            self._known.add(module)
            self.models.append(ModelFacts.of(module, call.path, self._counted, self._tracker.numbers_of))
        if outermost:  # `_given` comes next: with arguments by name, too
            call.trained, call.generates = any(p.requires_grad for p in module.parameters()), _is_in("generate")
            module._forward_pre_hooks_with_kwargs[self._hooks[0].id] = True

    def is_outermost(self):
        """Tell whether a module that is called now is a model: a part that backward calls again is none."""
        return not self._open and torch._C._current_graph_task_id() == -1

    def _given(self, module, args, kwargs=None):
        """Note the batch of a model's call. Not in code that is being compiled."""
        if not is_compiling() and module._forward_pre_hooks_with_kwargs.pop(self._hooks[0].id, False):
            self.rows.enter([*tensors_in(args), *tensors_in(kwargs)], self._of_this_step)

    def leave_module(self, module, arguments):
        """Note where the call ended, and those in it that raised and did not leave."""
        if not any(opened() is module for opened, _ in self._open):
            return
        rows = [t.shape[0] for t in tensors_in(arguments) if t.ndim > 1]
        opened = None
        while opened is not module:
            reference, call = self._open.pop()
            opened = reference()
            call.end, call.rows = len(self._tracker.ops), rows[0] if rows else None
            call.inputs = self._tracker.numbers_of(arguments)
            call.nodes = call.nodes[0], torch._C._autograd._get_sequence_nr()
            call.sequence_first = getattr(opened, "batch_first", None) is False
            if self.stopped is None:
                self.calls.append(call)
            self._closed = reference, call

    def _returned(self, module, arguments, output):
        """Note what a call returned; it has been noted as ended before. Not in code that is being compiled."""
        reference, call = self._closed
        if not is_compiling() and reference is not None and reference() is module:
            call.outputs |= self._tracker.numbers_of(output)

    def saved(self, tensor):
        """Note in which calls, and whether it wants a gradient: such a one may be rounded, no mask, no statistic."""
        for _, call in self._open:
            call.last_saving = len(self._tracker.ops)
        if tensor.requires_grad:
            self.wanting |= self._tracker.numbers_of(tensor)

    def stepped(self, optimizer):
        """Note the end of a step, and what the optimizer is."""
        by_hand = isinstance(optimizer, HandWritten)
        end, self._of_this_step = optimizer.at if by_hand else (len(self._tracker.ops), len(self._tracker.records))
        self.steps.append(end)
        self._ends.ended(optimizer, self._of_this_step)
        if by_hand:
            self._updated.update((p, None) for p in optimizer.parameters)
            for parameter in optimizer.parameters:
                self._tracker.own_parameter(parameter)
        elif optimizer not in self._known:
            self._known.add(optimizer)
            self.optimizers.append(OptimizerFacts.of(optimizer))
            self._no_gradients += no_gradients.count(optimizer)
            self._updated.update((p, None) for group in optimizer.param_groups for p in group["params"])

    def has(self, phase):
        """Tell whether the script has been in a phase that is not training, before the last step began: what is newer
        may have its backward yet."""
        self._see_which_go_back()
        begun = self.steps[-2] if len(self.steps) > 1 else 0
        calls = [call for call in self.calls if call.end <= begun]
        return phase in {*(span.phase for span in self._saved), *map(own_phase, calls)}

    def _see_which_go_back(self):
        run = sorted(self._tracker.nodes_run)
        for call in self.calls:
            first, after = (bisect_left(run, number) for number in call.nodes)
            call.goes_back = first < after

    def end(self):
        """Note that the last step has ended: what outlived its step is alive now."""
        self.stop()
        self.stopped = self.steps[-1]  # of one by hand the end is known later
        self._outlived = self._ends.outlived(self._tracker)
        self._longest = longest_item(self.calls, self._tracker.records)

    def stop(self):
        """Note that what follows is no part of the recording."""
        self._log.end()
        self.stopped = len(self._tracker.ops)
        if all(p in self._counted for p in self._updated):  # else it updates copies, and whose is not known
            self._waiting = sum(p.numel() for p in self._counted if p.requires_grad and p not in self._updated)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats()
            kinds = ("requested", "allocated", "reserved")
            self._cuda = {kind: stats.get(f"{kind}_bytes.all.peak", 0) for kind in kinds}

    def recording(self):
        """Return the ScriptRecording up to the last step, or up to now if the script ended before."""
        if self.stopped is None:
            self.stop()
        self._see_which_go_back()
        trace, calls = self._tracker.until(self.stopped), [call for call in self.calls if call.end <= self.stopped]
        spans = [span for span in (*self._saved, *self.by_hand.spans) if span.begin <= self.stopped]
        if self._log.events is not None and trace.device == "cpu":
            trace = with_those_of_a_log(with_unseen(trace, self._log.events), self._log.events)
        return ScriptRecording(trace, self.steps, calls, self.wanting, self.models,
                               self.optimizers, self._cuda, self._waiting, self.rows.of, self.rows.why_not,
                               *self._outlived, spans, self._uses, self._longest, self._no_gradients,
                               self._recomputed)


def _is_in(name):
    """Tell whether a function of this name runs."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class _Before:
    """Hears of each model before its tracker does."""

    def __init__(self, on_model, recorder):
        self._on_model, self._recorder, self._known = on_model, recorder, weakref.WeakSet()

    def enter_module(self, module):
        """Let a model be changed at its first call."""
        if self._recorder.is_outermost() and module not in self._known:
            self._known.add(module)
            self._on_model(module)
