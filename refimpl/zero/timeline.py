"""What a rank computes, and what is on the wire meanwhile: the spans of a step, to be drawn and to be added up.

    with timeline(engine) as line, memory.track(engine.model, engine.optimizer) as t:
        engine.backward(engine.forward(tokens, tokens)); engine.step()
    line.plot(t)

A collective lasts from the moment that it was begun until it is known to have ended: each time that anything begins or
ends, those under way are asked. (A message of gloo's cannot tell: there it is known once somebody has waited.) What of
it a rank spent waiting, for it had nothing else to do, is `waited`; what was under computation cost no time. Times are
the host's: a GPU does later what is asked of it here.
"""

import contextlib
import time

import torch

from ..memory.gantt import Span, gantt
from .zero3 import default_units

COMPUTE, LANES = "compute", {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}


class Line:
    """One rank's spans, in the order in which they ended. In lane "compute" by unit: forward, backward,
    update. In lanes "gather" and "reduce" by bucket: all_gather; reduce_scatter, all_reduce. What ranks tell each other
    before they go on has no name."""

    def __init__(self):
        self.spans = []

    def of(self, kind):
        """The spans of a kind that have a name."""
        return [span for span in self.spans if span.kind == kind and span.name]

    def seconds(self, kind):
        """Added up, of all spans of a kind."""
        return sum(span.seconds for span in self.spans if span.kind == kind)

    def waited(self, kind):
        """Seconds of these in which the rank did nothing else."""
        return sum(span.waited for span in self.spans if span.kind == kind) / 1e9

    def hidden(self, kind):
        """Seconds of these in which the rank computed: what overlap saves."""
        waits = [(span.end - span.waited, span.end) for span in self.spans if span.waited]
        return sum(_common(span, each) - sum(_common((max(begin, each.begin), min(end, each.end)), span)
                                             for begin, end in waits)
                   for span in self.spans if span.kind == kind for each in self.spans if each.lane == COMPUTE) / 1e9

    def plot(self, trace=None):
        """A Gantt chart, over the bytes of a tracker that ran at the same time."""
        return gantt(sorted(self.spans, key=lambda span: span.begin), trace, [COMPUTE, "gather", "reduce"])


def _common(a, b):
    """Nanoseconds that two intervals have in common; a Span is one, too."""
    (a_begin, a_end), (b_begin, b_end) = ((x.begin, x.end) if isinstance(x, Span) else x for x in (a, b))
    return max(0, min(a_end, b_end) - max(a_begin, b_begin))


@contextlib.contextmanager
def timeline(engine):
    """Write down what `engine` (of any stage) computes and communicates in here: a Line."""
    recorder = _Recorder(engine)
    holders = [each for each in (engine, getattr(engine, "gathering", None)) if each is not None]
    for holder in holders:
        holder.comm = recorder
    hooks = recorder.hooks()
    try:
        yield recorder.line
    finally:
        recorder.compute(None)
        for hook in hooks:
            hook.remove()
        for holder in holders:
            holder.comm = recorder.comm


class _Recorder:
    """A Communicator that writes down its collectives; and marks of what is computed, each of which ends the last."""

    def __init__(self, engine):
        self.engine, self.comm, self.line, self.running, self.pending = engine, engine.comm, Line(), None, []
        self.names = {module: name for name, module in engine.model.named_modules()}

    def __getattr__(self, name):
        return getattr(self.comm, name)

    # --- compute -----------------------------------------------------------------------------------------------------

    def compute(self, kind, name=""):
        """From now on `kind` of `name` is computed; None: nothing."""
        now = self.look()
        if self.running:
            self.line.spans.append(Span(COMPUTE, *self.running, now))
        self.running = (kind, name, now) if kind else None

    def hooks(self):
        """On the units' forward and backward, and on the optimizer."""
        hooks, optimizer = [], self.engine.optimizer
        for unit in getattr(self.engine, "units", None) or default_units(self.engine.model):
            hooks.append(unit.register_forward_pre_hook(lambda unit, _: self.compute("forward", self.names[unit])))
            hooks.append(unit.register_forward_hook(self._after_forward))
        hooks.append(optimizer.register_step_pre_hook(lambda *_: self.compute("update")))
        return [*hooks, optimizer.register_step_post_hook(lambda *_: self.compute(None))]

    def _after_forward(self, unit, args, output):
        self.compute(None)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: self._before_backward(unit))

    def _before_backward(self, unit):
        if not self.running:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.compute(None))
        self.compute("backward", self.names[unit])

    # --- on the wire -------------------------------------------------------------------------------------------------

    def all_reduce(self, x, op="sum", *, out=None, async_op=False):
        """As the communicator's, written down."""
        return self._begin("all_reduce", x, out, async_op, op)

    def reduce_scatter(self, x, op="sum", *, out=None, async_op=False):
        """As the communicator's, written down."""
        return self._begin("reduce_scatter", x, out, async_op, op)

    def all_gather(self, x, *, out=None, async_op=False):
        """As the communicator's, written down."""
        return self._begin("all_gather", x, out, async_op)

    def _begin(self, collective, x, out, async_op, *op):
        name, begin, nbytes = self._bucket(x, out), self.look(), max(x.nbytes, 0 if out is None else out.nbytes)
        work = getattr(self.comm, collective)(x, *op, out=out, async_op=async_op)
        if async_op:
            begun = _Work(self, work, (LANES[collective], collective, name, begin), nbytes)
            if not begun.ended:
                self.pending.append(begun)
            return begun
        now = self.look()
        self.line.spans.append(Span(LANES[collective], collective, name, begin, now, nbytes, now - begin))
        return work

    def _bucket(self, x, out):
        """The name of the bucket that x or out is a buffer of."""
        engine = self.engine
        for flats in (engine._gradients, getattr(engine, "full", {}), getattr(engine, "flat", {})):
            for bucket, flat in flats.items():
                if flat is x or flat is out:
                    return bucket.name
        return ""

    def look(self):
        """Now; and what has ended by now, has ended."""
        now = time.time_ns()
        for work in [work for work in self.pending if work.handle.done()]:
            work.ended = now
            self.pending.remove(work)
        return now


class _Work:
    """A Handle that tells when it was seen to have ended, and how long somebody waited for it."""

    def __init__(self, recorder, handle, what, nbytes):
        self.recorder, self.handle, self.what, self.nbytes, self.ended = recorder, handle, what, nbytes, None
        self.waited = time.time_ns() - what[-1]  # to begin it
        if handle.done():
            self.ended = what[-1] + self.waited

    def wait(self):
        """The handle's own."""
        begin = self.recorder.look()
        result, now = self.handle.wait(), time.time_ns()
        if self.what:
            if self in self.recorder.pending:
                self.recorder.pending.remove(self)
            self.waited += 0 if self.ended else now - begin
            end = self.ended or now
            self.recorder.line.spans.append(Span(*self.what, end, self.nbytes, self.waited))
            self.what = None
        return result

    def done(self):
        """The handle's own."""
        return self.handle.done()
