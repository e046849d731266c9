"""What a column-parallel layer computes in backward while it sends: the order in which each begins, and its wait."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import sequence_parallel, tensor_parallel

TOKENS = 24  # no weight has as many rows
CONFIG = GPTConfig(vocab_size=32, context_length=TOKENS, layers=1, hidden=32, heads=2)


class Products(TorchDispatchMode):
    """Notes each product of two matrices: "input" if it gives the gradient of one, else "weight"."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.__name__ in ("mm.default", "addmm_.default"):
            self.events.append("input" if len(out) == TOKENS else "weight")
        return out


class Noting(FakeCommunicator):
    """Notes large collectives: when each begins, and when somebody waits for it."""

    events = None

    def _run(self, collective, x, *args, **kwargs):
        handle = super()._run(collective, x, *args, **kwargs)
        if self.events is None or x.numel() < TOKENS * CONFIG.hidden // 2:
            return handle
        self.events.append(collective)
        if torch.is_tensor(handle):
            self.events.append(f"wait {collective}")
            return handle
        wait = handle.wait
        handle.wait = lambda: (self.events.append(f"wait {collective}"), wait())[1]
        return handle


def events_of(split):
    comm = Noting(0, 2)
    model = split(GPT(CONFIG), comm)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    loss = model(tokens, tokens)
    comm.events = []
    with Products(comm.events):
        loss.backward()
    return " ".join(comm.events)


MLP = {tensor_parallel: "all_reduce weight wait all_reduce",
       sequence_parallel: "all_gather input reduce_scatter wait all_gather weight wait reduce_scatter"}
QKV = {tensor_parallel: "all_reduce weight weight weight wait all_reduce",
       sequence_parallel: "all_gather input input input reduce_scatter wait all_gather weight weight weight "
                          "wait reduce_scatter"}


@pytest.mark.parametrize("split", [tensor_parallel, sequence_parallel])
@pytest.mark.parametrize("layer", [MLP, QKV], ids=["mlp", "qkv"])
def test_collectives_go_beside_products(split, layer):
    assert layer[split] in events_of(split)


def test_a_layer_that_waits_at_once_would_fail_here(monkeypatch):
    def run(self, collective, x, out, async_op, *args, **kwargs):
        answer = FakeCommunicator._run(self, collective, x, out, False, *args, **kwargs)
        if self.events is not None and x.numel() >= TOKENS * CONFIG.hidden // 2:
            self.events += [collective, f"wait {collective}"]
        return type("Ended", (), {"wait": lambda handle: answer})() if async_op else answer

    monkeypatch.setattr(Noting, "_run", run)
    for split in (tensor_parallel, sequence_parallel):
        assert MLP[split] not in events_of(split) and QKV[split] not in events_of(split)


def test_products_of_a_plain_layer_are_told_apart():
    layer, events = nn.Linear(32, 16), []
    out = layer(torch.randn(TOKENS, 32, requires_grad=True))
    with Products(events):
        out.sum().backward()
    assert sorted(events) == ["input", "weight"]
