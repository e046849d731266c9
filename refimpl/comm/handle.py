"""A collective under way, and how its result comes to lie where it was asked for."""

from .tensors import same_memory
from .versions import let_go, unseen


class Handle:
    """A collective under way. `wait()` ends it and returns its result, however often it is called.

    On CUDA with NCCL, `wait()` makes the current stream wait, not the CPU, as torch's own handles do.
    `works`: what it waits for, torch's works, or anything with `wait()` and `is_completed()`.
    """

    def __init__(self, works, result=None, landing=None, lent=(), references=None, pending=None, span=None):
        self.works, self._result, self._landing, self._lent = works, result, landing, lent
        self._span = span  # of the recorder that is active, if there is one
        self._references = references
        self._pending = set() if pending is None else pending
        if self._pending:
            self._pending.difference_update([handle for handle in self._pending if handle.done()])
        if span is not None:
            span.launched(self.done)

    def __del__(self):
        if not self.done():  # torch drops what is not sent yet when its work is dropped: somebody has to hold it
            self._pending.add(self)

    def wait(self):
        """End it; its result."""
        if self._span is None:
            return self._wait()
        span, self._span = self._span, None
        with span.waiting():
            return self._wait()

    def _wait(self):
        with unseen():
            for work in self.works:
                work.wait()
                del work
        self.works = ()
        let_go(self._lent, self._references)
        if self._landing is not None:
            landed(self._landing, self._result)
        self._landing, self._lent = None, ()
        return self._result

    def done(self):
        """Whether `wait()` would return at once. gloo cannot tell of a send: False until waited for."""
        return all(work.is_completed() for work in self.works)


def landed(landing, out):
    """`out`, with what came to lie in `landing`, which may be `out` itself or a tensor beside it."""
    if not same_memory(landing, out):
        out.detach().copy_(landing)
    return out
