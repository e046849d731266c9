"""What strikes a rank of a mesh, and where: for tests of what the others do then."""

import os
import signal
import time

from together_kit import batches, engine_of

from refimpl.saving import sharded

STRIKES = "strikes at"


class Leaves(Exception):
    """Ends the function of a rank early, without an error."""


def raises():
    raise ValueError("on purpose")


def exits():
    os._exit(3)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(60)


def leaves():
    raise Leaves


FAULTS = {fault.__name__: fault for fault in (raises, exits, is_killed, hangs, leaves)}
PLACES = ("forward", "backward", "send", "step", "save")
MESHES = ({"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "tp": 2})
VICTIM = 2


def struck(mesh, fault, place, folder):
    """Train a step, save it, and train on: on one rank a fault strikes at a place of the second step."""
    engine = engine_of(mesh.comm, "gpt", {axis: mesh.sizes[axis] for axis in ("tp", "cp", "pp", "dp")}, micro_batches=2)
    given = batches(2, mesh.here["dp"], mesh.dp)
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
        group = engine.mesh.get_parallel_group("pp")
        group.send = lambda *_, **__: fault()
    else:
        group = engine.mesh.get_parallel_group("cp")
        group.send_recv = lambda *_, **__: fault()
