"""Parameters and masters are brought up to date after somebody else has written to them: a user, or a load."""

import contextlib

import torch


@contextlib.contextmanager
def gathered(engine, write=False):
    """Gather all parameters, to be read. What is written to them is lost, unless `write`: then rank 0's values are
    those of all ranks when the context ends, of masters too. All ranks call it; at stages 0 to 2 parameters are
    whole anyway."""
    yield
    engine.writes.see()
    if write:
        engine.parameters.spread(engine._stored)
        for bucket, master in engine.update.masters.items():
            with engine.update.loaded(bucket), torch.no_grad():
                master.copy_(engine.parameters.shards[bucket])


@torch.no_grad()
def publish(engine):
    """Bring the parameters up to date after a load has written to masters, or to this rank's shards."""
    if engine.stage == 3:
        engine.gathering.see(engine.parameters.whole)  # a module's writes from before the load are not to be kept
        engine.gathering.end_step()  # what a forward without a backward has left whole
    for bucket in engine.buckets if engine.stage else ():
        with engine.update.loaded(bucket):
            engine.update.round_master(bucket)
        handle = engine.parameters.updated(bucket)
        if handle is not None:
            handle.wait()
    engine.writes.see()
