"""A collective under way, with works that only pretend."""

import weakref

import pytest
import torch
from patience import in_time, patiently

from refimpl import memory
from refimpl.comm import Handle
from refimpl.comm.backend.torch_internals import lend
from refimpl.comm.handle import Then, copied_to_out


class Work:
    def __init__(self, completed=False, error=None):
        self.completed, self.error, self.waits = completed, error, 0

    def wait(self):
        self.waits += 1
        if self.error:
            raise self.error
        self.completed = True

    def is_completed(self):
        return self.completed


def test_waiting_ends_it_once_and_answers_every_time():
    work, out, landing = Work(), torch.zeros(3), torch.ones(3)
    handle = Handle([work], out, landing)
    assert not handle.done() and out.sum() == 0 and handle.wait() is out and out.tolist() == [1, 1, 1]
    landing.fill_(5)
    assert handle.wait() is out and work.waits == 1 and handle.done()
    assert out.tolist() == [1, 1, 1], "the second wait copies nothing"


def test_who_drops_a_handle_does_not_drop_the_work():
    pending = set()
    Handle([Work()], pending=pending)
    assert len(pending) == 1  # it has not completed
    Handle([Work(completed=True)], pending=pending)
    Handle([Work(completed=True)], pending=pending).wait()
    assert len(pending) == 1  # of those that have, none is held once another begins, or when it was waited for


@patiently
def test_what_a_work_holds_is_released_before_anybody_waits_for_that():
    """Else it would be waited for in vain, a second in each collective."""
    with memory.track():
        lent, references = lend(torch.ones(3))
        work = Work()
        work.tensors = list(lent)
        handle = Handle([work], lent=lent, references=references)
        del work
        with in_time(0.9):
            handle.wait()


def test_a_work_that_fails_fails_every_time():
    handle = Handle([Work(error=RuntimeError("Connection closed"))], torch.zeros(1), torch.ones(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            handle.wait()


def test_what_has_landed_where_it_belongs_is_not_copied():
    out = torch.zeros(4)
    version = out._version
    assert copied_to_out(out, out) is out and copied_to_out(out.detach(), out) is out and out._version == version
    parameter = torch.nn.Parameter(torch.zeros(4))
    assert copied_to_out(torch.ones(4), parameter) is parameter and parameter.sum() == 4


def test_what_was_sent_is_gone_when_what_follows_begins():
    handle = Handle([Work()], torch.ones(3))
    there = weakref.ref(handle)
    then = Then(handle, lambda result: (result.sum().item(), there()))
    del handle
    assert then.wait() == then.wait() == (3, None)
