"""What the tests of offload share: engines that train with a store or an update, and where they ended."""

import functools
import gc

import pytest
import torch
from zero_kit import BUCKET, equal, gpt, parameters_of, train_gpt

from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero1, Zero2, Zero3

STAGES = (Zero1, Zero2, Zero3)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)
LOW = torch.bfloat16


def engine_of(comm, make, dtype=None, **options):
    """An engine on a small GPT of several buckets."""
    return make(gpt(dtype=dtype), comm, options.pop("optimizer", ADAMW), bucket_bytes=BUCKET, **options)


def alone(make, dtype=None, **options):
    """The engine of one rank."""
    return engine_of(FakeCommunicator(0, 1), make, dtype, **options)


def continued(comm, make, dtype, steps, store, others, folder=None):
    """[whether parameters are the device's to the bit]: after these steps under `store`, after two more, and after two
    more of what it saved (in a folder, or as a state_dict) under each of `others`."""
    plain, stored = engine_of(comm, make, dtype), engine_of(comm, make, dtype, store=store)
    for engine in (plain, stored):
        train_gpt(engine, steps)
    same, engines = [equal(parameters_of(plain), parameters_of(stored))], [plain, stored]
    saved = stored.save(folder) if folder else stored.state_dict()
    for other in others:
        engines.append(engine_of(comm, make, dtype, store=other))
        if folder:
            engines[-1].load(folder)
        else:
            engines[-1].load_state_dict(saved)
    for engine in engines:
        train_gpt(engine, 2)
    return same + [equal(parameters_of(plain), parameters_of(engine)) for engine in engines[1:]]


def check_one_engine(store, steps=0):
    """A store serves one engine, and the next when that is gone; each trains for some steps."""
    first = alone(Zero1, store=store)
    with pytest.raises(RuntimeError, match="used by two engines"):
        alone(Zero1, store=store)
    train_gpt(first, steps)
    del first
    gc.collect()
    train_gpt(alone(Zero1, store=store), steps)
