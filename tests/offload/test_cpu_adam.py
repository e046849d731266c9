"""AdamW in host memory: the same numbers, saved and loaded anywhere; bytes on the device; what is refused."""

import functools

import pytest
import torch
from offload_kit import ADAMW, LOW, STAGES, alone, engine_of, train_gpt
from rank_pool import on_ranks
from torch import nn
from zero_bodies import tried_again
from zero_kit import Elsewhere, farthest, gradients_of_step, parameters_of, token_batches

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.offload import CPUAdam, DiskStore, HostStore
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3
from refimpl.zero.update import ShardedUpdate

SMALL = functools.partial(CPUAdam, sub_group_size=1000)
# eps above the rounding of gradients: with 1e-8 that of a gradient near 0 decides how far Adam goes.
FOREACH = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-6, foreach=True)


@pytest.mark.parametrize(("make", "dtype", "world_size"), [  # each stage and each number of ranks in each dtype
    (Zero1, torch.float32, 1), (Zero1, LOW, 2), (Zero2, torch.float32, 2), (Zero2, LOW, 4), (Zero3, torch.float32, 4),
    (Zero3, LOW, 1), (Zero3, LOW, 2)])
@on_ranks("world_size")
def test_training_ends_where_the_devices_does(comm, make, dtype, world_size):
    """CPUAdam's weights after 20 steps, 10 of them under another update and store."""
    ratio, kernel = {1: (1.0, "torch"), 2: (0.4, "c++"), 4: (1.0, "c++")}[world_size]
    update, optimizer = functools.partial(SMALL, ratio=ratio, kernel=kernel), FOREACH if dtype != LOW else ADAMW
    engines = {"device": engine_of(comm, make, dtype, optimizer=optimizer),
               "host": engine_of(comm, make, dtype, optimizer=optimizer, update=update())}
    for engine in engines.values():
        train_gpt(engine, 10)
    saved = engines["host"].state_dict()
    for name, options in {"back": {}, "both": {"update": update(), "store": HostStore()}}.items():
        engines[name] = engine_of(comm, make, dtype, optimizer=optimizer, **options)
        engines[name].load_state_dict(saved)
    for engine in engines.values():
        train_gpt(engine, 10)
    expected = parameters_of(engines["device"])
    for name, engine in engines.items():
        assert farthest(parameters_of(engine), expected) <= 1e-6, name


class OnTheDevice(ShardedUpdate):
    """The mutant: an update that leaves all states on the device."""


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("make", STAGES)
@pytest.mark.parametrize("update", [CPUAdam(), OnTheDevice])
def test_no_state_and_no_gradient_of_a_bucket_stays_on_the_device(update, make, dtype):
    engine = engine_of(FakeCommunicator(0, 4), make, dtype, update=update)
    with memory.track(engine.model) as t:
        for tokens in token_batches(2):
            gradients_of_step(engine, tokens)
            before = t.now
            engine.step()
    counters = 4 * sum(len(pairs) for pairs in engine.update.pieces.values())
    assert (t.now["optimizer state"] <= counters) == (update is not OnTheDevice)
    assert (before["gradients"] == 0) == (update is not OnTheDevice and make is not Zero1)


def test_clipping_and_reductions_of_several_micro_batches():
    engines = [alone(Zero2, LOW, update=update) for update in (None, SMALL())]
    for tokens in token_batches(3, 3):
        norms = []
        for engine in engines:
            gradients_of_step(engine, tokens)
            norms.append(engine.clip_grad_norm_(0.1))
            engine.step()
        assert norms[0] == norms[1]
    assert farthest(*map(parameters_of, engines)) == 0


def test_zero_1_reduces_again_after_gradients_were_reduced():
    engines = [alone(Zero1, LOW, update=update) for update in (None, SMALL(), SMALL(ratio=0.5))]
    for engine in engines:
        for tokens in token_batches(3, 2):
            for micro_batch in tokens:
                gradients_of_step(engine, micro_batch[None])
            engine.step()
    for engine in engines[1:]:
        assert farthest(parameters_of(engines[0]), parameters_of(engine)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, LOW, torch.float16])
@pytest.mark.parametrize("make", STAGES)
def test_groups_that_differ_and_parameters_that_nobody_used(make, dtype):
    class Some(nn.Module):
        """Layers of which one is never used."""

        def __init__(self):
            super().__init__()
            self.first, self.idle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.first(x)).square().mean()

    def two_groups(named):
        decayed = [p for _, p in named if p.dim() == 2]
        return [{"params": decayed, "lr": 1e-2}, {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}]
    found, x = [], torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for update in (None, SMALL(), SMALL(ratio=0.3), SMALL(kernel="torch")):
        torch.manual_seed(0)
        engine = make(Some().to(dtype), FakeCommunicator(0, 1), ADAMW, groups=two_groups, update=update)
        scheduler = torch.optim.lr_scheduler.StepLR(engine, 1, 0.5)
        for _ in range(3):
            engine.backward(engine(x))
            engine.step()
            scheduler.step()
        found.append(parameters_of(engine))
        states = {name for pairs in engine.update.pieces.values() for piece, own in pairs
                  if own in engine.optimizer.state for name in [piece.slot.name]}
        assert not any(name.startswith("idle") for name in states) and len(states) == 4
    for other in found[1:]:
        assert farthest(found[0], other) <= (1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("make", STAGES)
@on_ranks(2)
def test_a_step_that_raised_can_be_tried_again(comm, make, dtype):
    assert tried_again(*(engine_of(comm, make, dtype, update=SMALL(ratio=0.5)) for _ in range(2)))


class BelowHost(Elsewhere):
    """A store for what is in host memory, such as a disk."""

    below_host = True


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("make", STAGES)
def test_a_store_below_host_memory_takes_the_states(make, dtype):
    plain, engine = alone(make, dtype), alone(make, dtype, update=SMALL(), store=(store := BelowHost()))
    for each in (plain, engine):
        train_gpt(each, 3, 2)
    parts = engine.update.masters.values()
    assert all(not x.untyped_storage().nbytes() for part in parts for x in (part.master, *part.moments))
    assert {kind for kind, _ in store.tensors} == {"states"} | ({"parameters"} if make is Zero3 else set())
    assert farthest(parameters_of(plain), parameters_of(engine)) <= (1e-6 if dtype == torch.float32 else 0)


def test_gradients_that_are_dropped_leave_a_store_below_host_memory():
    store = BelowHost()
    engine = Zero1(nn.Linear(4, 4), FakeCommunicator(0, 1), ADAMW, update=SMALL(kernel="torch"), store=store)
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert {kind for kind, _ in store.tensors} == {"states", "gradients"}
    engine.zero_grad()
    assert {kind for kind, _ in store.tensors} == {"states"}


@pytest.mark.parametrize("make", STAGES)
def test_states_rest_on_a_disk_and_are_updated_in_host_memory(make, tmp_path):
    plain = alone(make, LOW, update=SMALL())
    with DiskStore(tmp_path, buffer_bytes=4096, buffer_count=4) as store:
        engine = alone(make, LOW, update=SMALL(), store=store)
        for each in (plain, engine):
            train_gpt(each, 3, 2)
        parts = engine.update.masters.values()
        assert all(not x.untyped_storage().nbytes() for part in parts for x in (part.master, *part.moments))
        assert farthest(parameters_of(plain), parameters_of(engine)) == 0


@pytest.mark.parametrize("ratio", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("make", STAGES)
def test_a_share_of_the_elements_is_on_the_host_and_no_more(make, ratio):
    for part in alone(make, LOW, update=SMALL(ratio=ratio)).update.masters.values():
        on_host, on_device = part.master.numel(), part.device_master.numel()
        assert ratio * (on_host + on_device) - 64 < on_host <= ratio * (on_host + on_device)


def test_moments_have_the_names_of_torchs_adam():
    engine = alone(Zero2, LOW, update=SMALL())
    train_gpt(engine, 1)
    states = engine.optimizer.state.values()
    assert all(each["exp_avg_sq"].min() >= 0 for each in states) and min(each["exp_avg"].min() for each in states) < 0


def test_weights_that_somebody_wrote_are_the_masters():
    engine = alone(Zero3, LOW, update=SMALL(ratio=0.5))
    with engine.gathered(write=True):
        for p in engine.model.parameters():
            p.data.fill_(0.25)
    for part in engine.update.masters.values():
        assert set(torch.cat([part.master, part.device_master]).tolist()) <= {0.0, 0.25}  # 0 in padding
    assert any(part.n for part in engine.update.masters.values())


@pytest.mark.parametrize(("options", "words"), [
    ({"ratio": 1.5}, "ratio=1.5: expected a number from 0 to 1"), ({"ratio": -0.1}, "ratio=-0.1"),
    ({"ratio": "half"}, "ratio='half'"), ({"ratio": True}, "ratio=True"), ({"ratio": float("nan")}, "ratio=nan"),
    ({"sub_group_size": 0}, "sub_group_size=0"), ({"sub_group_size": 1e6}, "sub_group_size=1000000.0"),
    ({"kernel": "cuda"}, "kernel='cuda'"), ({"threads": -1}, "threads=-1")])
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CPUAdam(**options)


@pytest.mark.parametrize(("optimizer", "error", "words"), [
    (functools.partial(torch.optim.SGD, lr=0.1), TypeError, "SGD: CPUAdam computes torch.optim.AdamW"),
    (functools.partial(torch.optim.AdamW, amsgrad=True), ValueError, "amsgrad=True"),
    (functools.partial(torch.optim.AdamW, maximize=True), ValueError, "maximize=True"),
    (functools.partial(torch.optim.Adam, weight_decay=0.1), ValueError, "weight_decay=0.1 of Adam")])
def test_another_optimizer_is_refused(optimizer, error, words):
    with pytest.raises(error, match=words):
        alone(Zero1, optimizer=optimizer, update=CPUAdam())


def test_options_that_are_changed_later_are_refused_in_the_step():
    engine = alone(Zero1, update=CPUAdam())
    engine.param_groups[0]["maximize"] = True
    gradients_of_step(engine)
    with pytest.raises(ValueError, match="maximize=True"):
        engine.step()


def test_double_precision_and_data_parallel_are_refused():
    with pytest.raises(TypeError, match="torch.float64: CPUAdam has fp32 masters"):
        alone(Zero1, torch.float64, update=CPUAdam())
    with pytest.raises(TypeError, match="DataParallel has no shards to update"):
        alone(DataParallel, update=CPUAdam())


def test_it_says_which_kernel_it_took():
    assert repr(CPUAdam(kernel="torch", threads=2)) == ("CPUAdam(ratio=1.0, sub_group_size=8388608, kernel=torch, "
                                                        "threads=2)")
