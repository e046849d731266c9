"""What is written down while a script runs: its trace, and who called what.

The tracker knows storages. To say what a technique would save, three facts more are needed: when a module's forward
began and ended and what it returned, whether a saved tensor wanted a gradient, and where the steps ended.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..common.nested_tensors import tensors_in
from ..memory.trace import Trace
from ..memory.tracker import Tracker
from .models import ModelFacts, OptimizerFacts


@dataclass
class RecordedCall:
    """One forward of a module: its path, its first operation, the one after its last, and the records of its tensor
    arguments and of its output. `switches`: the recorder's numbers of the modules that ran in it, first and after last;
    `goes_back`: whether a backward went through what it made."""

    path: str
    begin: int
    end: int
    depth: int
    inputs: set = field(default_factory=set)
    outputs: set = field(default_factory=set)
    rows: int | None = None  # the first dimension of what it was given
    switches: tuple = (0, 0)
    goes_back: bool = False
    sequence_first: bool = False  # that dimension is time to its module: batch_first=False


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


class ScriptRecorder(Tracker):
    """A Tracker that notes calls, steps and models besides. Use it as a context; `recording()` at any time."""

    def __init__(self, on_model=None):
        super().__init__()
        self.steps, self.calls, self.wanting, self.models, self.optimizers = [], [], set(), [], []
        self.stopped, self._cuda, self._waiting = None, {}, 0
        self._open, self._known, self._on_model = [], weakref.WeakSet(), on_model
        self._closed = None, None
        self._gone_back = set()  # numbers of the switches whose autograd nodes ran
        self._counted = WeakIdKeyDictionary()  # parameters of models so far: a part that is called alone is no other
        self._updated = WeakIdKeyDictionary()  # parameters of optimizers that stepped

    def __enter__(self):
        super().__enter__()
        self._outputs = register_module_forward_hook(self._returned)
        return self

    def __exit__(self, *exception):
        self._outputs.remove()
        super().__exit__(*exception)

    def enter_module(self, module):
        """Note the call, and at a model's first call what it is; `on_model(module)` may change it before it runs."""
        recomputes = torch._C._current_graph_task_id() != -1  # a part that backward calls again is no model
        if not self._modules and module not in self._known and not recomputes:
            self._known.add(module)
            if self._on_model:
                self._on_model(module)
            super().enter_module(module)
            self.models.append(ModelFacts.of(module, self._names[module], self._counted))
        else:
            super().enter_module(module)
        if self.stopped is None:
            call = RecordedCall(self._names[module], len(self.ops), -1, len(self._modules))
            call.switches = len(self._switches) - 1, 0
            self._open.append((module, call))

    def leave_module(self, module, arguments):
        """Note where the call ended."""
        rows = [t.shape[0] for t in tensors_in(arguments) if t.ndim > 1]
        inputs = self._numbers_of(arguments)
        super().leave_module(module, arguments)
        while self._open:
            opened, call = self._open.pop()
            call.end, call.rows, call.inputs = len(self.ops), rows[0] if rows else None, inputs
            call.switches = call.switches[0], len(self._switches) - 1
            call.sequence_first = getattr(opened, "batch_first", None) is False
            self.calls.append(call)
            self._closed = module, call
            if opened is module:  # those above it have raised, and did not leave
                break

    def _returned(self, module, arguments, output):
        """Note what a call returned; it may have been noted as ended before. Not in code that is being compiled."""
        if is_compiling():
            return
        opened, call = self._open[-1] if self._open and self._open[-1][0] is module else self._closed
        if opened is module:
            call.outputs |= self._numbers_of(output)

    def _switch_of_node(self):
        """Note of which call the autograd node is that runs: a backward may free nothing (retain_graph=True)."""
        number = super()._switch_of_node()
        if self.stopped is None:
            self._gone_back.add(number)
        return number

    def _numbers_of(self, things):
        """The numbers of the records of all tensors in a thing that are known."""
        things = list(things.values()) if isinstance(things, dict) else things
        found = (self._alive.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(things)
                 if tensor.layout is torch.strided)
        return {entry[0] for entry in found if entry is not None}

    def saved(self, tensor):
        """Note whether it wants a gradient: such a one may be rounded, a mask or a statistic not."""
        super().saved(tensor)
        if tensor.requires_grad:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.wanting.add(entry[0])

    def stepped(self, optimizer):
        """Note the end of a step, and what the optimizer is."""
        self.steps.append(len(self.ops))
        if optimizer not in self._known:
            self._known.add(optimizer)
            self.optimizers.append(OptimizerFacts.of(optimizer))
            self._updated.update((p, None) for group in optimizer.param_groups for p in group["params"])

    def stop(self):
        """Note that what follows is no part of the recording."""
        self.stopped = len(self.ops)
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
        for call in self.calls:
            call.goes_back = not self._gone_back.isdisjoint(range(*call.switches))
        events = [event for event in self.events if event[0] < self.stopped]
        trace = Trace(self.ops[: self.stopped], self.records, events, self.first_call, self._device, self.began_ns,
                      self.notes)
        return ScriptRecording(trace, self.steps, self.calls, self.wanting, self.models, self.optimizers, self._cuda,
                         self._waiting)
