"""A rank that fails anywhere in a step or a save: all end within 5 s, it is named with its place, and the checkpoint on
disk is whole.

Each of five faults strikes in each of five places, on one of three meshes; with REFIMPL_ALL_FAULTS=1 on each of them.
"""

import itertools
import os
import signal
import time

import pytest
from patience import patiently, within
from together_kit import batches_of, engine_of

from refimpl.comm import FakeCommunicator, RankError
from refimpl.engine import launch as launch_on
from refimpl.mesh import Mesh
from refimpl.saving import sharded

pytestmark = pytest.mark.faults
STRIKES, VICTIM = "strikes at", 2


class Leaves(Exception):
    """Ends the function of a rank early, without an error."""


def throw(error):
    raise error


FAULTS = {"raises": lambda: throw(ValueError("on purpose")), "exits": lambda: os._exit(3),
          "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "hangs": lambda: time.sleep(60),
          "leaves": lambda: throw(Leaves())}
PLACES = ("forward", "backward", "send", "step", "save")
MESHES = ({"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "tp": 2})
EVERY = list(itertools.product(enumerate(FAULTS), enumerate(PLACES), enumerate(MESHES)))
CASES = [(fault, place, axes) for (i, fault), (j, place), (k, axes) in EVERY
         if (i + j) % len(MESHES) == k or os.environ.get("REFIMPL_ALL_FAULTS") == "1"]


def struck(mesh, fault, place, folder):
    """Train a step, save it, and train on: on one rank a fault strikes at a place of the second step."""
    engine = engine_of(mesh.comm, "gpt", {axis: mesh.sizes[axis] for axis in ("tp", "cp", "pp", "dp")}, micro_batches=2)
    given = batches_of(engine, 2)
    engine.train_step(*given[0])
    engine.step()
    engine.save(folder)
    mesh.comm.barrier()
    try:
        if mesh.comm.rank == VICTIM:
            arm(engine, place, lambda: strike(fault))
        engine.train_step(*given[1])
        engine.step()
        engine.save(folder)
    except Leaves:
        return


def strike(fault):
    print(STRIKES, time.time(), flush=True)
    FAULTS[fault]()


def arm(engine, place, fault):
    """Let the fault strike once, where this rank comes to the place."""
    layer = list(engine.model.blocks)[-1].mlp
    if place == "forward":
        layer.register_forward_pre_hook(lambda *_: fault())
    elif place == "backward":
        layer.register_full_backward_hook(lambda *_: fault())
    elif place == "step":
        engine.optimizer.register_step_pre_hook(lambda *_: fault())
    elif place == "save":
        sharded.sync_folder = lambda folder: fault()
    elif engine.mesh.pp > 1:
        engine.mesh.get_parallel_group("pp").send = lambda *_, **__: fault()
    else:
        engine.mesh.get_parallel_group("cp").send_recv = lambda *_, **__: fault()


@pytest.mark.parametrize(("fault", "place", "axes"), CASES)
@patiently
def test_all_ranks_end_and_the_one_to_blame_is_named_with_its_place(fault, place, axes, tmp_path, capfd):
    mesh = Mesh(**axes)
    with pytest.raises(RankError) as failed:
        launch_on(struck, mesh, fault, place, tmp_path / "state", timeout=2)
    ended = time.time()
    text = capfd.readouterr().out
    began = float(text[text.index(STRIKES) :].split()[2])
    within(ended - began, 5)
    assert failed.value.ranks == (VICTIM,) and mesh.describe(VICTIM) in str(failed.value)
    engine = engine_of(FakeCommunicator(0, 1), "gpt", {}, seed=7)
    engine.load(tmp_path / "state")  # which reads and verifies all of it
    assert engine.steps == 1
