"""Backward in place, as autograd computes it while nobody watches.

Before it writes into a tensor, autograd asks whether a dispatch mode is on, and if one is, computes out of place
(`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp, `areAnyTensorSubclassLike` in FunctionsManual.cpp).
A tracker is a dispatch mode, and so is what makes tensors fake. So two things are done here for it:
- gradients that meet at a tensor are added in place under the condition of input_buffer.cpp: that nobody but the
engine holds the sum so far;
- formulas that ask run without the mode and count as one operation. On fake tensors, which make autograd compute out
of place by themselves, trackers look away: what a formula returns is as large either way.

A mode that the user turns on has the same effect on the user's program, so beside one nothing is done.
"""

import functools
import sys
import threading
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.variable import ImperativeEngine
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

aten = torch.ops.aten
PYTHON = torch._C.DispatchKey.Python
_VANILLA = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# Nodes whose formula asks. The first take what they return; the others more.
_NO_MORE = ("CummaxBackward0 CumminBackward0 GatherBackward0 IndexBackward0 IndexSelectBackward0 KthvalueBackward0 "
            "MaskedSelectBackward0 MaxBackward0 MedianBackward1 MinBackward0 ModeBackward0 NanmedianBackward1 "
            "SortBackward0 SortBackward1 TakeBackward0 TopkBackward0 TraceBackward0").split()
TAKES_MORE = ("BinaryCrossEntropyBackward0 ClampBackward0 CumprodBackward0 LinalgHouseholderProductBackward0 "
              "MaskedFillBackward1 MaxBackward1 MedianBackward0 MinBackward1 NanmedianBackward0 OrmqrBackward0 "
              "ProdBackward0 ProdBackward1").split()
_ASKING = frozenset(_NO_MORE + TAKES_MORE)

_now = threading.local()  # .ran: the node whose formula has run, so that the engine adds up what it returned


class WatchedEngine(ImperativeEngine):
    """Autograd's engine, which notes before each backward where gradients will meet and which formulas ask.

    - `report(name, outputs)`: called when such a formula ran as one operation.
    - `begins(tensors)`: called when a backward begins, with what it is of.
    """

    def __init__(self, report, begins=None):
        super().__init__()
        self._report, self._begins = report, begins

    def run_backward(self, tensors, *args, **kwargs):
        """Run autograd's own `run_backward` under hooks on these nodes."""
        if self._begins is not None:
            self._begins(tensors)
        hooks = list(self._hooks(tensors))
        try:
            return super().run_backward(tensors, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, tensors):
        feeding, asking = _meetings(tensors)
        for node in feeding:
            yield node.register_hook(_ran)
        for node in asking:
            yield node.register_prehook(functools.partial(_without_mode, node._sequence_nr()))
            yield node.register_hook(functools.partial(self._with_mode, name_of(node)))

    def _with_mode(self, name, outputs, gradients):
        if torch._C._dispatch_tls_is_dispatch_key_excluded(PYTHON):
            torch._C._dispatch_tls_set_dispatch_key_excluded(PYTHON, False)
            self._report(name, outputs)
        elif getattr(_now, "formula", None) is not None:
            _now.formula = None
            self._report(name, outputs)


def name_of(node):
    """Return the name of a node of autograd's. A user's own Function may have set `ctx.name` to something else."""
    return type(node).name(node)


def _meetings(tensors):
    """Return the nodes that feed an input which another node feeds as well, and the nodes whose formula asks."""
    nodes = [tensor.grad_fn if isinstance(tensor, torch.Tensor) else tensor.node for tensor in tensors]
    nodes = [node for node in nodes if node is not None]
    met, first, feeding, asking = set(nodes), {}, set(), []
    while nodes:
        node = nodes.pop()
        if name_of(node) in _ASKING:
            asking.append(node)
        for edge in node.next_functions:  # (the next node, which of its inputs)
            following = edge[0]
            if following is None:
                continue
            if edge in first:
                feeding |= {node, first[edge]}
            else:
                first[edge] = node
            if following not in met:
                met.add(following)
                nodes.append(following)
    return feeding, asking


def _running():
    """Identify the node that runs: (backward, place in the order of nodes), or None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


def _ran(outputs, gradients):
    _now.ran = _running()


def _without_mode(number, gradients):
    """Turn the trackers off for the formula of node `number`, unless a mode or tensor of the user's is there as well.
    Fake tensors need their mode: there the trackers look away."""
    kinds = {type(gradient) for gradient in gradients if gradient is not None}
    if kinds.issubset(_VANILLA[:2]) and _only_trackers():
        torch._C._dispatch_tls_set_dispatch_key_excluded(PYTHON, True)
    elif kinds == {FakeTensor} and _only_trackers(fake=True):
        _now.formula = number


def inside_formula():
    """Tell whether a formula runs that counts as one operation."""
    number = getattr(_now, "formula", None)
    if number is None:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node._sequence_nr() == number


def _only_trackers(fake=False):
    """Tell whether no mode is on that autograd would mind if the trackers were not there; of fake tensors none that
    leaves these alone."""
    return all(getattr(mode, "only_watches", False) or isinstance(mode, FakeTensorMode)
               or (fake and getattr(mode, "leaves_fake_tensors_alone", False))
               for mode in _get_current_dispatch_mode_stack())


# --- inside the mode -------------------------------------------------------------------------------------------------


def sum_of(args):
    """Return the operation by which autograd would add up if no mode were on: `add`, or where it adds gradients that
    meet, `add_`."""
    ran = getattr(_now, "ran", None)
    return aten.add_.Tensor if ran is not None and ran == _running() and _accumulates(args) else aten.add.Tensor


def _accumulates(args):
    """Tell whether the engine adds the gradient args[1] to the sum so far, args[0], in place."""
    held, readings = _held(args), getattr(_now, "readings", None)
    if readings is not None:  # being calibrated
        readings.append(held)
        return False
    so_far, gradient = args
    return (not torch.is_grad_enabled() and type(so_far) in _VANILLA and type(gradient) in _VANILLA
            and held == calibrate(type(so_far) is FakeTensor)
            and so_far.layout is torch.strided and not so_far._is_zerotensor()
            and _dense(so_far) and _only_trackers(type(so_far) is FakeTensor))


def _dense(tensor):
    """Tell whether the elements fill one piece of memory, each its own place, in whatever order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _held(args):
    """Count what holds the tensor args[0], its storage and its Python object, this function and its callers included.
    They pass `args` on: where dynamo runs frames, as after an error in it, a call holds its arguments once more."""
    return (args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata),
            sys.getrefcount(args[0]))


@functools.cache
def calibrate(fake):
    """Return `_held` of a sum that the engine alone holds, read in a backward of three numbers."""
    _now.readings = readings = []
    engine = WatchedEngine(None)
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        with FakeTensorMode() if fake else nullcontext(), _Probe():
            x = torch.ones(3, requires_grad=True, device="cpu") * 1  # the engine of another device has its own thread
            engine.run_backward((x * 2 + x * 3,), (torch.ones(3, device="cpu"),), False, False, (), True, True)
    _now.readings = None
    return readings[0]


class _Probe(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.add.Tensor:
            func = sum_of(args)
        return func(*args, **kwargs)
