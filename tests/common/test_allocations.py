"""Traces: from the tracker and from dry runs, on models of others too; files; events that make no sense."""

import numpy as np
import pytest
import torch
from allocator_kit import random_trace
from static_kit import gpt, llama

from refimpl import memory
from refimpl.allocator import AllocationTrace, DamagedTrace, replay
from refimpl.common.allocations import ALLOC, FREE, Maker


def step():
    """A training step of a GPT."""
    model, loss_of = gpt(vocab_size=300, context_length=64, layers=2, hidden=64, heads=4)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(torch.randint(0, 300, (2, 64))).backward()
    optimizer.step()


def outside_step():
    """One of a Llama of transformers."""
    _, loss_of = llama(300, 64, 2)
    loss_of(torch.randint(0, 300, (2, 64))).backward()


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("train", [step, outside_step])
def test_a_step_has_the_peak_that_the_tracker_read(train, dry):
    if dry:
        read = memory.dry_run(train)
    else:
        with memory.track() as read:
            train()
    trace = AllocationTrace.of(read)
    assert trace.peak == read.peak.total
    assert {"activations", "gradients"} <= {trace.category_of(i) for i in range(len(trace.blocks))}
    assert replay(trace).peak >= trace.peak and replay(trace).failure is None


def test_a_block_knows_its_category_and_what_made_it():
    with memory.track() as read:
        step()
    trace = AllocationTrace.of(read)
    at = int(trace.live_bytes.argmax())
    names = {trace.name_of(block) for action, block, _, _ in trace.events.tolist()[:at] if action == ALLOC}
    assert any("blocks" in name for name in names), "the module"


def test_files_are_compact_and_whole(tmp_path):
    trace = random_trace(20_000)
    path = trace.save(tmp_path / "trace.npz")
    again = AllocationTrace.load(path)
    assert (again.events == trace.events).all() and (again.blocks == trace.blocks).all()
    assert again.categories == trace.categories and again.names == trace.names
    assert path.stat().st_size < 12 * len(trace), "bytes an event"
    data = path.read_bytes()
    for damaged in (data[:len(data) // 2], b"", b"PK\x03\x04", data[:200] + bytes(50) + data[250:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedTrace, match=r"trace\.npz is no trace that AllocationTrace\.save wrote"):
            AllocationTrace.load(path)
    with pytest.raises(FileNotFoundError):
        AllocationTrace.load(tmp_path / "other.npz")


@pytest.mark.parametrize(("change", "message"), [
    (lambda e: e["block"].__setitem__(3, 0), "event 3 (frees|takes) block 0"),
    (lambda e: e["block"].__setitem__(0, 99), "event 0: block 99 of 3"),
    (lambda e: e["action"].__setitem__(0, -1), "event 0 frees block 0, which is not live: it was never taken")])
def test_events_that_make_no_sense_are_named(change, message):
    found = Maker()
    for _ in range(3):
        found.free(found.alloc(10))
    trace = found.trace()
    events = trace.events.copy()
    change(events)
    with pytest.raises(DamagedTrace, match=message):
        AllocationTrace(events, trace.blocks)


def test_a_block_of_which_no_more_is_known_has_no_name_and_is_of_the_first_stream_at_the_first_moment():
    found = Maker()
    found.free(found.alloc(10))
    trace = found.trace()
    assert trace.events.tolist() == [(ALLOC, 0, 0, 0), (FREE, 0, 0, 0)]
    assert trace.blocks["nbytes"].tolist() == [10] and trace.category_of(0) == trace.name_of(0) == ""


def test_repeated_frees_what_is_left():
    trace = random_trace(100)
    twice = trace.repeated(2)
    assert twice.peak == trace.peak and len(twice.blocks) == 2 * len(trace.blocks)
    assert np.array_equal(twice.live_bytes[:100], trace.live_bytes) and twice.live_bytes[-1] == 0
