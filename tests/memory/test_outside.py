"""The tracker on models and loops that others wrote, beside the allocator alone: each reads a run of its own."""

import pytest
import torch
from outside_programs import PROGRAMS
from outside_reading import read_alone, read_tracked, warmed_up

from refimpl import memory
from refimpl.common.ledger import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from refimpl.common.nested_tensors import tensors_in
from refimpl.memory.tracking import storages
from refimpl.memory.tracking.taking import NOT_COUNTED
from refimpl.memory.workspaces import WORKSPACE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WITHIN = 0.005  # of the allocator's peak
GRADIENTS_GO = {"llama, stepping in backward"}  # before the last one is there
OTHER_GRADIENTS = {"vit, gradient penalty": 4 * 4 * 3 * 32 * 32}  # of a batch of images


def storages_of(tensors):
    """Bytes of the storages under `tensors`, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def parameters_of(objects):
    return {p for thing in objects if isinstance(thing, torch.nn.Module) for p in thing.parameters()}


@pytest.fixture(scope="module", params=PROGRAMS)
def run(request):
    """(a program's name, the tracker's reading of its run, its objects, bytes of each gradient that autograd wrote):
    one run for all that is asked of the tracker, while the allocator alone reads another."""
    written, objects = {}, []

    def watch(program):
        objects.extend(program.objects)
        for p in parameters_of(objects):
            if p.requires_grad and request.param not in GRADIENTS_GO:
                p.register_post_accumulate_grad_hook(lambda p: written.update({id(p): p.grad.nbytes}))

    return request.param, read_tracked(PROGRAMS[request.param], watch), objects, written


def test_the_peak_is_the_allocators_and_the_rest_has_a_name(run):
    name, tracked, *_ = run
    alone = read_alone(PROGRAMS[name])
    assert all(map(torch.equal, alone.results, tracked.results)) and len(alone.results) == len(tracked.results) > 0
    assert tracked.net == alone.net
    if abs(tracked.peak - alone.peak) > WITHIN * alone.peak:  # then kernels took it, the trace says so, and which did
        assert tracked.peak < alone.peak
        (note,) = tracked.log.notes
        assert NOT_COUNTED in note and note in repr(tracked.log) and note.split("; ")[0] in tracked.log._repr_html_()
        both = with_workspaces(PROGRAMS[name])
        assert both.peak[WORKSPACE] > 0 and not both.notes
        assert abs(both.peak.total - both.start.total - alone.peak) <= WITHIN * alone.peak
        assert max((r for r in both.records if r.mark == WORKSPACE), key=lambda r: r.nbytes).op in note


def with_workspaces(build):
    with warmed_up(build) as (program, _), memory.track(*program.objects) as t, memory.measure("cpu") as m:
        program.step()
    return memory.with_workspaces(t, m)


def test_parameters_gradients_and_state_to_the_byte(run):
    name, tracked, objects, written = run
    t = tracked.log
    optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    assert t.now[PARAMETERS] == storages_of(parameters_of(objects))
    assert t.now[OPTIMIZER_STATE] == storages_of(tensors_in([list(each.state.values()) for each in optimizers]))
    if name not in GRADIENTS_GO:
        gradients = t.timeline.nbytes[:, t.timeline.categories.index(GRADIENTS)].max()
        assert gradients == sum(written.values()) + OTHER_GRADIENTS.get(name, 0)
    assert t.now[GRADIENTS] == storages_of(p.grad for p in parameters_of(objects) if p.grad is not None)


@pytest.mark.parametrize("name", ["deberta-v2", "mamba", "jamba"])
def test_a_tracker_that_is_in_the_way_is_seen(name, monkeypatch):
    """With gradients added up out of place, as under any other dispatch mode."""
    alone = read_alone(PROGRAMS[name])
    monkeypatch.setattr(storages, "sum_of", lambda args: torch.ops.aten.add.Tensor)
    monkeypatch.setattr("refimpl.memory.tracking.in_place._ASKING", frozenset())
    assert read_tracked(PROGRAMS[name]).peak > (1 + WITHIN) * alone.peak
