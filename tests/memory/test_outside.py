"""The tracker on models and loops that others wrote, beside the allocator alone: each reads a run of its own."""

import pytest
import torch
from outside_programs import PROGRAMS
from outside_reading import read_alone, read_tracked

from refimpl import memory
from refimpl.memory.ledger import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from refimpl.memory.tracking import storages
from refimpl.memory.tracking.taking import NOT_COUNTED
from refimpl.memory.tracking.tensors import tensors_in
from refimpl.memory.workspaces import WORKSPACE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WITHIN = 0.005  # of the allocator's peak
GRADIENTS_GO = {"llama, stepping in backward"}  # before the last one is there
OTHER_GRADIENTS = {"vit, gradient penalty": 4 * 4 * 3 * 32 * 32}  # of a batch of images


def storages_of(tensors):
    """Bytes of the storages under `tensors`, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def parameters_of(objects):
    return {id(p): p for thing in objects if isinstance(thing, torch.nn.Module) for p in thing.parameters()}.values()


def states(objects):
    """(bytes of parameters, of optimizer state) as the models and optimizers themselves hold them."""
    optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    state = tensors_in([list(optimizer.state.values()) for optimizer in optimizers])
    return storages_of(parameters_of(objects)), storages_of(state)


def watch_gradients(objects):
    """A dict that fills with the bytes of each gradient that autograd writes."""
    found = {}
    for parameter in parameters_of(objects):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: found.update({id(p): p.grad.nbytes}))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_the_allocators_and_the_rest_has_a_name(name):
    alone, tracked = read_alone(PROGRAMS[name]), read_tracked(PROGRAMS[name])
    assert all(map(torch.equal, alone.results, tracked.results)) and len(alone.results) == len(tracked.results) > 0
    assert tracked.net == alone.net
    if abs(tracked.peak - alone.peak) > WITHIN * alone.peak:  # then kernels took it, the trace says so, and which did
        assert tracked.peak < alone.peak
        (note,) = tracked.log.notes
        assert NOT_COUNTED in note and note in repr(tracked.log) and note.split("; ")[0] in tracked.log._repr_html_()
        both = with_workspaces(PROGRAMS[name])
        assert both.peak[WORKSPACE] > 0 and not both.notes
        assert abs(both.peak.total - both.start.total - alone.peak) <= WITHIN * alone.peak
        biggest = max((r for r in both.records if r.mark == WORKSPACE), key=lambda r: r.nbytes).op
        assert biggest in note


def with_workspaces(build):
    program = build()
    for _ in range(2):
        program.step()
    with memory.track(*program.objects) as t, memory.measure("cpu") as m:
        program.step()
    return memory.with_workspaces(t, m)


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_gradients_and_state_to_the_byte(name):
    program = PROGRAMS[name]()
    program.step()
    found = {} if name in GRADIENTS_GO else watch_gradients(program.objects)
    with memory.track(*program.objects) as t:
        program.step()
    parameters, state = states(program.objects)
    assert (t.now[PARAMETERS], t.now[OPTIMIZER_STATE]) == (parameters, state)
    gradients = t.timeline.nbytes[:, t.timeline.categories.index(GRADIENTS)].max()
    if name not in GRADIENTS_GO:
        assert gradients == sum(found.values()) + OTHER_GRADIENTS.get(name, 0)
    assert t.now[GRADIENTS] == storages_of(p.grad for p in parameters_of(program.objects) if p.grad is not None)


@pytest.mark.parametrize("name", ["deberta-v2", "mamba", "jamba"])
def test_a_tracker_that_is_in_the_way_is_seen(name, monkeypatch):
    """With gradients added up out of place, as under any other dispatch mode."""
    alone = read_alone(PROGRAMS[name])
    monkeypatch.setattr(storages, "twin_of", lambda func, args: func)
    monkeypatch.setattr("refimpl.memory.tracking.in_place._ASKING", frozenset())
    assert read_tracked(PROGRAMS[name]).peak > (1 + WITHIN) * alone.peak
