"""What the tests of offload share: engines that train with a store or an update, and where they ended."""

import functools

import torch
from zero_kit import BUCKET, equal, gpt, parameters_of, train_gpt

from refimpl.offload import HostStore
from refimpl.zero import Zero1, Zero2, Zero3

STAGES = (Zero1, Zero2, Zero3)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)
LOW = torch.bfloat16


def engine_of(comm, make, dtype=None, **options):
    """An engine on a small GPT of several buckets."""
    return make(gpt(dtype=dtype), comm, options.pop("optimizer", ADAMW), bucket_bytes=BUCKET, **options)


def same_as_on_the_device(comm, make, dtype, steps):
    """Whether HostStore trains as the device does; and after what it saved is loaded under another store."""
    torch.set_num_threads(1)
    plain, stored = engine_of(comm, make, dtype), engine_of(comm, make, dtype, store=HostStore())
    for engine in (plain, stored):
        train_gpt(engine, steps // 2)
    again = engine_of(comm, make, dtype, store=HostStore(depth=1))
    again.load_state_dict(stored.state_dict())
    back = engine_of(comm, make, dtype)
    back.load_state_dict(stored.state_dict())
    for engine in (plain, stored, again, back):
        train_gpt(engine, steps - steps // 2)
    expected = parameters_of(plain)
    return [equal(expected, parameters_of(engine)) for engine in (stored, again, back)]
