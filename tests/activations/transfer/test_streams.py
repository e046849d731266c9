"""What is asked of CUDA's streams, in which order; what they make of it is in tests/gpu."""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from refimpl.activations import offload_activations
from refimpl.activations.transfer.streams import CUDATransfer, Rehearsal


class Stream:
    """Notes what it is asked for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event {len(self.log)}"


@pytest.fixture
def log(monkeypatch):
    """What the streams and `copy_` were asked for; the tensors are fake, so that none is pinned."""
    log, running, copy_ = [], [None], torch.Tensor.copy_
    main = Stream("main", log)
    @contextmanager
    def on(stream):
        running[0] = stream
        yield
        running[0] = None
    def noted(target, source, non_blocking=False):
        log.append(f"{running[0].name} copies, non_blocking={non_blocking}")
        return copy_(target, source)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return log


def test_copies_wait_for_the_computation_and_the_computation_for_copies(log):
    transfer = CUDATransfer()
    with FakeTensorMode():
        flat = torch.empty(100)
        host, out = transfer.to_host(flat)
        transfer.wait(out)
        back, ticket = transfer.to_device(host, torch.device("cpu"))
        transfer.wait(ticket)
    copy = ["side waits for all of main", "side copies, non_blocking=True", "side records"]
    assert log == [*copy, "main waits for event 3", *copy, "main waits for event 7"]
    assert host.shape == back.shape == (100,) and host.dtype is back.dtype is torch.float32
    assert len(transfer._streams) == 1, "one stream for both directions: what went out has arrived when it is fetched"


def test_what_is_on_the_host_stays():
    assert not CUDATransfer().offloads(torch.zeros(1))


def test_a_rehearsal_copies_everything_within_the_host_and_notes_it():
    x, rehearsal = torch.randn(64, 64, requires_grad=True), Rehearsal()
    with offload_activations(torch.nn.Linear(1, 1), smallest=0, transfer=rehearsal) as c:
        loss = (x * 1).sin().sin().sin().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad((x * 1).sin().sin().sin().sum(), x)[0])
    assert rehearsal.log == 3 * [("out", x.nbytes)] + 3 * [("in", x.nbytes)] and c.report.host == 3 * x.nbytes
