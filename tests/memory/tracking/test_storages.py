"""Storages: born, viewed, resized and freed, as the allocator sees them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads_kit import in_a_thread

from refimpl import memory
from refimpl.model import GPT, GPTConfig

MiB = 2**20
PROGRAM = st.lists(st.tuples(st.sampled_from("new view inplace add delete resize cat".split()), st.integers(0, 7),
                             st.integers(1, 400)), min_size=3, max_size=25)


def run_program(program):
    held = [torch.empty(10)]
    for what, which, size in program:
        x = held[which % len(held)]
        if what == "new":
            held.append(torch.empty(size))
        elif what == "view":
            held.append(x[: len(x) // 2])
        elif what == "inplace":
            x.mul_(x)
        elif what == "add":
            held.append(x + x)
        elif what == "cat":
            held.append(torch.cat([x, *held[:2]]))
        elif what == "delete" and len(held) > 1:
            held.pop(which % len(held))
        elif what == "resize" and x._base is None and sum(x is not y and x.untyped_storage() is y.untyped_storage()
                                                          for y in held) == 0:
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(4 * len(x))
        del x
    return held


@settings(max_examples=40, deadline=None)
@given(PROGRAM)
def test_any_program_of_tensors_reads_the_same_on_both_instruments(program):
    with memory.track() as t, memory.measure("cpu") as m:
        held = run_program(program)
    assert m.peak - 64 <= t.peak.total <= m.peak  # 64: a kernel's own scalars
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held}
    assert t.now.total == m.net == sum(storages.values()) and (t.timeline.nbytes >= 0).all()


def test_views_and_tied_weights_count_once():
    config = GPTConfig(vocab_size=256, context_length=64, layers=1, hidden=32, heads=4, tied=True)
    with memory.track() as t:
        model = GPT(config)
        views = [model.embedding.weight.view(-1), model.embedding.weight.t(), model.embedding.weight.detach()]
    assert t.now == {"parameters": 4 * config.parameter_count()}
    del views


def test_in_place_operations_take_nothing():
    x = torch.zeros(MiB)
    with memory.track(x) as t:
        x.add_(1).mul_(2).relu_()
    assert t.peak.total == t.start.total == 4 * MiB


def test_storages_older_than_the_context_are_there_from_the_start():
    named, touched, untouched = torch.zeros(100), torch.zeros(200), torch.zeros(300)
    with memory.track(named) as t:
        touched.sum()
        assert t.now.total == 1200
    assert t.start.total == 1200 and untouched.sum() == 0


def test_memory_of_another_library_counts_while_a_tensor_is_on_it():
    with memory.track() as t, memory.measure("cpu") as m:
        x = torch.from_numpy(np.zeros(1000))
        y = x.clone()
        del x
    assert (t.peak.total, t.now.total) == (16_000, 8000) and (m.peak, m.net) == (8000, 8000) and not y.any()


def test_tensors_freed_on_another_thread_are_freed():
    with memory.track() as t:
        in_a_thread([torch.zeros(1000)].clear)
    assert t.peak.total == 4000 and t.now.total == 0


def resize_step():
    """Free a weight after forward and bring it back before backward, as ZeRO-3 does."""
    linear, x = torch.nn.Linear(100, 100, bias=False), torch.randn(5, 100, requires_grad=True)
    values = linear.weight.detach().clone()
    with memory.track(linear) as t:
        y = linear(x).sum()
        storage = linear.weight.untyped_storage()
        storage.resize_(0)
        low = t.now["parameters"]
        storage.resize_(40_000)
        linear.weight.data.copy_(values)
        y.backward()
    return low, t.now["parameters"]


def test_a_storage_resized_to_nothing_and_back_is_followed(monkeypatch):
    assert resize_step() == (0, 40_000)
    monkeypatch.setattr(memory.Tracker, "resized", lambda self, storage, before: None)
    assert resize_step() != (0, 40_000)


def test_an_older_storage_is_known_by_its_size_before_it_was_resized():
    old = torch.zeros(100)
    with memory.track() as t:
        torch.zeros(1)
        old.untyped_storage().resize_(4000)
        torch.zeros(2)
    assert t.start.total == 400 and [row.ledger.total for row in t.timeline if row.operation == "resize_"] == [4000]
    assert t.timeline.totals.tolist() == [400, 404, 4000, 4008, 4000]


def test_an_older_tensor_that_an_operation_writes_to_is_older():
    old = torch.zeros(100)
    with memory.track() as t:
        torch.add(torch.zeros(100), 1, out=old)
    assert t.start.total == t.now.total == 400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_without_memory_count_nothing():
    x = torch.ones(100)
    with memory.track(x) as t:
        shape = torch.empty(1000, device="meta") * 2
        _, tangent = torch.func.jvp(lambda v: (v * 2, v.detach()), (x,), (x,))  # no derivative: a tensor of zeros
        assert t.now == {"inputs": 400, "temporaries": 1200}, t.now
    assert shape.is_meta and not tangent[1].any()
    assert memory.dry_run(lambda: torch.empty(1000, device="meta") * 2).peak.total == 0
    with memory.track(torch._efficientzerotensor((1000,))) as t:
        pass
    assert t.start.total == 0


def test_a_dry_run_inside_takes_nothing_of_the_real_memory():
    with memory.track() as t:
        inner = memory.dry_run(lambda: torch.nn.Linear(1000, 1000)(torch.ones(1, 1000)).sum().backward())
    assert t.peak.total == 0 and inner.peak["parameters"] == 4_004_000


def test_aliases_made_by_autograd_are_no_operations():
    with memory.track() as t:
        (torch.ones(3, requires_grad=True) + 1).exp().sum().backward()
    assert [op.name for op in t.ops if op.phase == "forward"] == ["ones", "add", "exp", "sum", "ones_like"]
    assert not any("detach" in op.name for op in t.ops)


def test_resizing_operations_are_followed():
    with memory.track() as t:
        x = torch.empty(10)
        x.resize_(1000)
        x.resize_(0)
        torch.add(torch.ones(2000), 1, out=x)
    assert t.now.total == x.untyped_storage().nbytes() == 8000


def test_a_marked_storage_has_that_category_before_and_after():
    early = memory.mark(torch.zeros(100), "communication")
    with memory.track(early) as t:
        late = memory.mark(torch.zeros(50)[10:], "paged out")
    assert t.start == {"communication": 400} and t.now == {"communication": 400, "paged out": 200}
    with memory.track(late) as t:
        pass
    assert t.now == {"paged out": 200}


def test_a_mark_ends_with_its_storage():
    memory.mark(torch.zeros(100), "communication")
    with memory.track() as t:
        held = [torch.zeros(100) for _ in range(50)]
    assert t.now == {"temporaries": 400 * len(held)}


def test_two_trackers_at_once_read_the_same(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as outer, memory.track(model, optimizer) as inner:
        step()
    assert outer.peak == inner.peak and outer.now == inner.now
