"""Each store under each stage and update, with micro-batches: the bits of no store, and nobody reads what is away."""

import contextlib
import functools

import pytest
import torch
from offload_kit import LOW, STAGES, engine_of
from rank_pool import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from zero_kit import Elsewhere, equal, own_rows, parameters_of, token_batches

from refimpl.offload import CPUAdam, DiskStore, HostStore, TieredStore
from refimpl.zero.internals.store import StoredUpdate

SMALL = {"buffer_bytes": 4096, "buffer_count": 2, "thread_count": 1}
STORES = {
    "bytes": lambda folder: Elsewhere(), "host": lambda folder: HostStore(),
    "disk": lambda folder: DiskStore(folder, **SMALL),
    "tiers": lambda folder: TieredStore(folder, device=240_000, host=100_000, **SMALL)}
UPDATES = {"stored": None, "on the host": functools.partial(StoredUpdate, device="cpu"), "CPUAdam": CPUAdam()}
LAYOUT = {"view", "_unsafe_view", "slice", "select", "detach", "as_strided", "expand", "t", "transpose", "permute",
          "unsqueeze", "squeeze", "alias", "split", "empty_like", "zeros_like", "ones_like", "full_like"}


class NobodyReadsEmptied(TorchDispatchMode):
    """Raises, by the name of the operation, where one reads or writes a tensor whose storage a store has emptied: read
    at address 0, it would end the process."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        for x in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.numel() and not x.untyped_storage().nbytes() and name not in LAYOUT:
                raise AssertionError(f"{name} of a tensor of shape {tuple(x.shape)} that is in a store")
        return operation(*args, **(kwargs or {}))


def train(engine, micro_batches, each):
    """Two steps; `each`: every micro-batch is reduced, not the last alone."""
    for tokens in token_batches(2, micro_batches):
        for i, rows in enumerate(tokens):
            mine = own_rows(engine.comm, rows)
            with contextlib.nullcontext() if each or i == micro_batches - 1 else engine.no_sync():
                engine.backward(engine.forward(mine, mine) / micro_batches)
        engine.clip_grad_norm_(0.5)
        engine.step()


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("make", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks("world_size")
def test_every_bit_is_that_of_no_store(comm, world_size, make, kind, update, micro_batches, each, tmp_path):
    dtype = LOW if micro_batches == 2 else torch.float32
    plain = engine_of(comm, make, dtype, update=UPDATES[update])
    store = STORES[kind](tmp_path)
    stored = engine_of(comm, make, dtype, update=UPDATES[update], store=store)
    train(plain, micro_batches, each)
    with NobodyReadsEmptied():
        train(stored, micro_batches, each)
    assert equal(parameters_of(plain), parameters_of(stored))
    away = [not x.untyped_storage().nbytes() for kept in stored._stored._kinds.values() for bucket in stored.buckets
            for x in kept(bucket)]
    assert kind == "tiers" or any(away) == bool(away)  # tiers keep what fits on the device


def test_a_reader_of_what_is_away_is_found():
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    with NobodyReadsEmptied(), pytest.raises(AssertionError, match=r"clone of a tensor of shape \(3,\)"):
        x.clone()
