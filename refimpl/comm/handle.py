"""A collective under way, and its result's way to where it was asked for."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .backend.tensors import same_memory
from .backend.torch_internals import unseen, wait_for_release

if TYPE_CHECKING:
    import torch


class Handle:
    """Holds a collective under way. `wait()` completes it and returns its result, however often it is called.

    On CUDA with NCCL, `wait()` makes the current stream wait, not the CPU, as torch's own handles do.
    `works`: what it waits for, torch's works, or anything with `wait()` and `is_completed()`. `order`, `number`: where
    it stands among the communicator's collectives (`collective_order.Order`); 0 for a message.
    """

    def __init__(self, works: Sequence[Any], result: Any = None, landing: Any = None,
                 lent: "Sequence[torch.Tensor]" = (), references: Any = None, pending: Any = None, span: Any = None,
                 order: Any = None, number: int = 0) -> None:
        self.works, self._result, self._landing, self._lent = works, result, landing, lent
        self._span = span  # of the active recorder, if any
        self._references, self._order, self._number = references, order, number
        self._pending = set() if pending is None else pending
        if self._pending:
            self._pending.difference_update([handle for handle in self._pending if handle.done()])
        if span is not None:
            span.launched(self.done, when_passed(works))

    def __del__(self):
        if not self.done():  # hold the works: torch cancels an unsent message when its work is dropped
            self._pending.add(self)

    def wait(self) -> Any:
        """Wait until it is complete; return its result."""
        if self._span is None:
            return self._wait()
        span, self._span = self._span, None
        with span.waiting():
            return self._wait()

    def _wait(self):
        order, self._order = self._order, None
        with unseen(), contextlib.nullcontext() if order is None else order.until_end(self._number):
            for work in self.works:
                work.wait()
                del work
        self.works = ()
        wait_for_release(self._lent, self._references)
        if self._landing is not None:
            copied_to_out(self._landing, self._result)
        self._landing, self._lent = None, ()
        return self._result

    def done(self) -> bool:
        """Tell whether `wait()` would return at once. Of messages gloo cannot tell, nor of what goes over a
        `Link`: False until `wait()`."""
        return all(work.is_completed() for work in self.works)


class Then:
    """Wraps a handle. `wait()` returns `finish(result)`, which is called once."""

    def __init__(self, handle, finish):
        self._handle, self._finish, self._result = handle, finish, None

    def wait(self):
        """Wait for the collective; return the function of its result."""
        if self._finish is not None:
            handle, finish, self._handle, self._finish = self._handle, self._finish, None, None
            result = handle.wait()
            del handle  # it holds what was sent
            self._result = finish(result)
        return self._result


def when_passed(works):
    """Return a function that tells when the last of these works has passed the link: ns since 1970, or None if none of
    them goes over one. It does not keep torch's works."""
    transfers = [work for work in works if hasattr(work, "passed")]
    return lambda: max(transfer.passed() for transfer in transfers) if transfers else None


def copied_to_out(landing, out):
    """Return `out`, with the result copied to it from `landing` unless that is the same memory."""
    if not same_memory(landing, out):
        out.detach().copy_(landing)
    return out
