"""Records what a rank computes and what is on the wire meanwhile, to be drawn and added up.

    with timeline(dict(model.named_children()), optimizer) as line:
        model(x).sum().backward(); optimizer.step()
    line.waited("all_gather"), line.seconds("all_gather"), line.hidden("all_gather"); line.plot()

The spans (`common.spans`) are: in lane "compute" forward and backward by unit, update, and what `comm.compute` takes;
in lanes "gather", "reduce" and "messages" collectives and messages, with their labels.
"""

import contextlib

import torch

from ..common.spans import COMPUTE, SpanRecorder

LANES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
MESSAGES = dict.fromkeys(("send", "recv", "send_recv"), "messages")


@contextlib.contextmanager
def timeline(units=None, optimizer=None, lanes=None):
    """Record what this rank does in this context; gives a `common.spans.Recording`.

    Collectives and messages report to the recorder by themselves: here are hooks for computation, of `units` ({name:
    module}) and of an optimizer. `lanes`: {kind: lane} of collectives, by default LANES and MESSAGES.
    """
    recorder = SpanRecorder({**LANES, **MESSAGES} if lanes is None else lanes)
    hooks = _hooks(units or {}, optimizer, recorder)
    try:
        with recorder:
            yield recorder.recording
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(units, optimizer, recorder):
    """Register hooks that record the forward and backward of each unit, and the optimizer's updates."""
    names = {unit: name for name, unit in units.items()}

    def before_forward(unit, args):
        recorder.enter(COMPUTE, "forward", names[unit])

    def after_forward(unit, args, output):
        recorder.leave(COMPUTE)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: before_backward(unit))

    def before_backward(unit):
        if not recorder.is_busy(COMPUTE):  # the first unit: the last one ends when autograd's run ends
            torch.autograd.Variable._execution_engine.queue_callback(lambda: recorder.leave(COMPUTE))
        recorder.enter(COMPUTE, "backward", names[unit])

    hooks = []
    for unit in names:
        hooks += [unit.register_forward_pre_hook(before_forward), unit.register_forward_hook(after_forward)]
    if optimizer is None:
        return hooks
    return [*hooks, optimizer.register_step_pre_hook(lambda *_: recorder.enter(COMPUTE, "update")),
            optimizer.register_step_post_hook(lambda *_: recorder.leave(COMPUTE))]
