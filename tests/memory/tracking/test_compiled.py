"""Compiled models under a tracker: the compiled code runs, then and afterwards, and its bytes are the allocator's."""

import shutil
import sys
import warnings

import pytest
import torch
from counting import counting_backend
from users_kit import function_of

from refimpl import memory
from refimpl.memory.tracking.compiled import _NAMES

GUARDS = torch._C._dynamo.guards


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp():
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)
    return torch.nn.Sequential(*layers)


def step(model, x):
    model(x).square().sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("how", ["compiled before", "compiled inside"])
def test_the_compiled_code_runs_inside_and_afterwards(how):
    (backend, calls), x = counting_backend(), torch.randn(128, 64)
    model = torch.compile(mlp(), backend=backend)
    if how == "compiled before":
        step(model, x)
    before = len(calls)
    with warnings.catch_warnings(action="error"), memory.track(model, x) as t:
        step(model, x)
    assert len(calls) == before + 1
    step(model, x)
    assert len(calls) == before + 2
    parameters = sum(p.nbytes for p in model.parameters())
    assert t.start["parameters"] == t.now["parameters"] == parameters
    assert t.timeline.nbytes[:, t.timeline.categories.index("gradients")].max() == parameters


def test_a_compiled_optimizer_and_a_users_function():
    twice = function_of(lambda ctx, x: x * 2, lambda ctx, gradient: gradient * 2)
    (backend, calls), model, x = counting_backend(), mlp(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    @torch.compile(backend=backend)
    def forward(x):
        return twice.apply(model(x)).sum()
    update = torch.compile(optimizer.step, backend=backend)
    with memory.track(model, optimizer, x) as t:
        forward(x).backward()
        update()
    assert len(calls) == 2 and t.now["gradients"] == t.now["parameters"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_buffers_of_inductors_code():
    originals = [getattr(GUARDS, f"_{name}") for name in _NAMES]
    model, x = torch.compile(mlp()), torch.randn(1024, 64)
    step(model, x)
    step(model, x)
    with memory.measure("cpu") as m:
        step(model, x)
    with memory.track(model, x) as t:
        step(model, x)
    assert t.peak.total - t.start.total == pytest.approx(m.peak, rel=1e-4) and t.now.total - t.start.total == m.net
    assert {op.name for op in t.ops} & {"empty_strided_cpu"} and "gelu" not in {op.name for op in t.ops}
    modules = sys.modules["torch._inductor.codecache"].PyCodeCache.modules
    assert [getattr(GUARDS, f"_{name}") for name in _NAMES] == originals
    assert {getattr(module, "empty_strided_cpu", originals[0]) for module in modules} == {originals[0]}
    with memory.measure("cpu") as again:
        step(model, x)
    assert again.peak == m.peak
