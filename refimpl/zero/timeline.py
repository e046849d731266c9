"""Records what an engine computes in a step, and what is on the wire meanwhile, to be drawn and added up.

    with timeline(engine) as line, memory.track(engine.model, engine.optimizer) as t:
        engine.backward(engine.forward(tokens, tokens)); engine.step()
    line.plot(t)

The spans (`memory.spans`) are: in lane "compute" forward and backward by unit, and update; in lanes "gather" and
"reduce" all_gather, reduce_scatter and all_reduce by bucket. Collectives that are not of a bucket, such as the checks
that all ranks do the same, have no name.
"""

import contextlib

import torch

from ..memory.spans import COMPUTE, SpanRecorder
from .units import default_units

LANES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}


@contextlib.contextmanager
def timeline(engine):
    """Record what `engine` (of any stage) computes and communicates in this context; gives a `memory.spans.Recording`.

    Collectives report to the recorder by themselves, with their bucket's name: here are hooks for computation.
    """
    recorder = SpanRecorder(LANES)
    hooks = _hooks(engine, recorder)
    try:
        with recorder:
            yield recorder.recording
    finally:
        for hook in hooks:
            hook.remove()
        buckets = {bucket.name for bucket in (*engine.buckets, *engine.frozen_buckets)}
        recorder.recording.spans[:] = [span if span.lane == COMPUTE or span.name in buckets else span._replace(name="")
                                       for span in recorder.recording.spans]


def _hooks(engine, recorder):
    """Register hooks that record the forward and backward of each unit, and the optimizer's updates."""
    names = {module: name for name, module in engine.model.named_modules()}

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
    for unit in getattr(engine, "units", None) or default_units(engine.model):
        hooks += [unit.register_forward_pre_hook(before_forward), unit.register_forward_hook(after_forward)]
    return [*hooks, engine.optimizer.register_step_pre_hook(lambda *_: recorder.enter(COMPUTE, "update")),
            engine.optimizer.register_step_post_hook(lambda *_: recorder.leave(COMPUTE))]
