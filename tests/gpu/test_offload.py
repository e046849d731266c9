"""Offload on a CUDA device: page-locked copies, bytes on it, the same numbers, copies beside the computation."""

import functools
import gc

import pytest
import torch
from offload_kit import STAGES
from torch import nn
from zero_kit import equal, farthest, gpt, parameters_of, train_gpt

from refimpl.comm import FakeCommunicator, Link
from refimpl.offload import CPUAdam, HostStore
from refimpl.offload.closed_forms import cpu_adam_traffic, host_store_bytes
from refimpl.offload.copies import StreamLink, host_bytes
from refimpl.zero import Zero1, Zero2, Zero3

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
DTYPES = [torch.float32, torch.bfloat16]
MIB = 2**20


def engine(make, dtype, **options):
    return make(gpt(dtype=dtype, device="cuda"), FakeCommunicator(0, 1, "cuda"), ADAMW, bucket_bytes=20_000, **options)


@pytest.mark.alone  # it reads the driver, which counts the bytes of all processes
def test_host_memory_is_page_locked_and_is_unlocked_when_it_is_freed(cuda):
    before = torch.cuda.mem_get_info()
    for _ in range(3):
        flat = host_bytes(64 * MIB, cuda)
        assert flat.is_pinned() and flat.nbytes == 64 * MIB
        view = flat.view(torch.float32)[10:]
        del flat
        gc.collect()
        assert view.is_pinned()
        view.fill_(1.0)
        del view
        gc.collect()
    assert torch.cuda.mem_get_info() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", STAGES)
def test_training_under_a_host_store_is_bit_equal(make, dtype):
    plain, stored = engine(make, dtype), engine(make, dtype, store=HostStore())
    for each in (plain, stored):
        train_gpt(each, 5)
    assert equal(parameters_of(plain), parameters_of(stored))


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", STAGES)
def test_training_under_cpu_adam_ends_where_the_devices_does(make, dtype, ratio):
    plain, ours = engine(make, dtype), engine(make, dtype, update=CPUAdam(ratio=ratio, sub_group_size=1000))
    for each in (plain, ours):
        train_gpt(each, 5, 2 if make is not Zero1 else 1)
    assert farthest(parameters_of(plain), parameters_of(ours)) <= (1e-5 if dtype == torch.float32 else 2e-2)
    each = cpu_adam_traffic(ours.buckets, make.stage, ratio=ratio, micro_batches=2 if make is not Zero1 else 1)
    assert ours.update.link.moved == {direction: 5 * count for direction, count in each.items()}


def large(make, **options):
    """One bucket for each of 6 layers of 2 M parameters, in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1448, 1448, bias=False) for _ in range(6))).to("cuda", torch.bfloat16)
    return make(model, FakeCommunicator(0, 1, "cuda"), ADAMW, bucket_bytes=1, **options)


def step(each):
    x = torch.ones(1, 1448, device="cuda", dtype=torch.bfloat16)
    each.backward(each(x).float().mean())
    each.step()


def allocated(each, steps=3):
    for _ in range(steps):
        step(each)
    torch.cuda.synchronize()
    torch.empty(512, device="cuda")  # the allocator looks for copies that have ended
    return torch.cuda.memory_allocated()


@pytest.mark.bytes
@pytest.mark.parametrize("options", [{}, {"store": HostStore}, {"update": CPUAdam}])
def test_states_are_not_on_the_device_between_steps(options):
    gc.collect()
    before = torch.cuda.memory_allocated()
    each = large(Zero2, **{name: make() for name, make in options.items()})
    parameters = sum(bucket.nbytes for bucket in each.buckets)
    held = allocated(each) - before
    states = 6 * parameters  # 12 bytes of each, parameters are 2
    if not options:
        assert held >= parameters + states
    else:
        assert held <= 1.1 * parameters
    if "store" in options:
        assert each._stored.store.host_bytes == host_store_bytes(each.buckets, 2)["host"]


def test_memory_that_was_given_back_is_not_overwritten_while_it_is_copied():
    """What is put is emptied at once: the copy has to read it before somebody else writes there."""
    store = HostStore(depth=8)
    for turn in range(10):
        tensors = [torch.full((4 * MIB,), float(10 * turn + i), device="cuda") for i in range(4)]
        for i, tensor in enumerate(tensors):
            store.put(("states", i), [tensor])
            torch.full((4 * MIB,), -1.0, device="cuda")  # may get the same memory
        for i, tensor in enumerate(tensors):
            store.get(("states", i))
            assert (tensor == 10 * turn + i).all()
            store.drop(("states", i))
    store.close()


@pytest.mark.alone
def test_copies_run_beside_the_computation_and_beside_each_other(cuda, seconds):
    link, x = StreamLink(cuda), torch.randn(4096, 4096, device="cuda")
    there, back = (torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    host, other = host_bytes(256 * MIB, cuda), host_bytes(256 * MIB, cuda)

    def copies(out=True, into=True):
        started = [link.start("to host", [(host, there)], host)] if out else []
        started += [link.start("to device", [(back, other)], back)] if into else []
        return started

    def wait(started):
        for copy in started:
            copy.wait()

    def compute(times=40):
        y = x
        for _ in range(times):
            y = y @ x / 64

    def beside():
        started = copies()
        compute()
        wait(started)

    for function in (beside, compute):
        seconds(function)
    one_way = [min(seconds(each) for _ in range(3)) for each in (lambda: wait(copies(True, False)),
                                                                lambda: wait(copies(False, True)))]
    both = min(seconds(lambda: wait(copies())) for _ in range(3))
    assert both < 0.8 * sum(one_way)  # the link carries both directions at a time
    alone, together = (min(seconds(each) for _ in range(3)) for each in (compute, beside))
    assert together < 1.15 * max(alone, both)


@pytest.mark.bytes
@pytest.mark.parametrize("make", [Zero1, Zero2, Zero3])
def test_gradients_leave_during_backward(make):
    each = large(make, update=CPUAdam())
    step(each)
    x = torch.ones(1, 1448, device="cuda", dtype=torch.bfloat16)
    each.backward(each(x).float().mean())
    for part in each.update.masters.values():
        assert part.gradient.is_pinned()
        part.wait_for_gradients()
    each.step()


def test_a_rate_is_refused_where_the_link_is_real():
    with pytest.raises(ValueError, match="leave rate out"):
        HostStore(rate=Link(1e9)).put(("states", 0), [torch.ones(4, device="cuda")])
