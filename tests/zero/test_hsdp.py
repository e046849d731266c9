"""Hybrid sharding on 2 × 2 ranks: numbers of one process, bytes of two ranks, and the traffic of each level."""

import functools

import pytest
import torch
from hsdp_kit import STAGES, STEPS, WithoutReplicas, alone, hybrid, levels, step_of
from rank_pool import failure, on_ranks
from torch import nn
from zero_kit import BUCKET, Elsewhere, Layers, farthest, gpt, model_of, parameters_of, rows_of, square, three_layers
from zero_steps import gpt_engine, traced, traced_gpt, tracked, train, update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel, Zero2
from refimpl.zero.closed_forms import hybrid_traffic, model_state_bytes
from refimpl.zero.update import ShardedUpdate


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shards", [1, 2, 4])
@on_ranks(4)
def test_clipped_steps_are_those_of_one_process(comm, shards, stage, dtype, bound):
    """Each rank begins with other values, of which rank 0's count."""
    engine = hybrid(stage, three_layers(comm.rank).to(dtype), comm, shards, bucket_bytes=300)
    norms, expected = alone(dtype)
    assert min(norms) > 0.05  # so that it clips
    assert [step_of(engine, step) for step in range(STEPS)] == pytest.approx(norms, rel=1e-6)
    assert farthest(parameters_of(engine), expected) < bound


class WholeBetween(Zero2):
    """Cuts nothing: each rank is a group of its own, and replicas exchange all of the gradients."""
    def __init__(self, model, comm, *args, shards=None, replicas=None, **options):
        super().__init__(model, comm, *args, shards=comm.split([comm.rank]), replicas=comm, **options)


def as_predicted(comm, make, micro_batches=1, **options):
    """Whether bytes, and the traffic of each level, of the third step are those of the closed forms."""
    dp, both = levels(comm)
    engine = gpt_engine(make, dp, **both, **options)
    traced_gpt(engine, 2, micro_batches)
    of = {"all": dp, **both}
    before = {level: each.traffic for level, each in of.items()}
    now, *_ = traced_gpt(engine, 1, micro_batches)
    sent = {level: each.traffic - before[level] for level, each in of.items()}
    sent["all"] -= sent["shards"] + sent["replicas"]  # sub-groups count in the whole
    options = {"bucket_bytes": BUCKET, **options}
    states = model_state_bytes(gpt(), 2, engine.stage, rank=comm.rank % 2, **options)
    traffic = hybrid_traffic(gpt(), 2, 2, engine.stage, rank=comm.rank, micro_batches=micro_batches, **options)
    return {name: now[name] for name in states} == dict(states), (
        {level: dict(each) for level, each in sent.items()} == {level: dict(each) for level, each in traffic.items()})


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_and_traffic_are_those_of_the_closed_forms(stage, micro_batches):
    assert launch(as_predicted, 4, stage, micro_batches) == [(True, True)] * 4


@pytest.mark.parametrize(("stage", "options"), [
    (1, {"reduce_dtype": torch.bfloat16}), (2, {"reduce_dtype": torch.bfloat16}), (3, {"persistence_threshold": 33})])
def test_bytes_and_traffic_with_options(stage, options):
    assert launch(functools.partial(as_predicted, **options), 4, stage) == [(True, True)] * 4


@pytest.mark.parametrize(("mutant", "verdict"), [(WithoutReplicas, (True, False)), (WholeBetween, (False, False))])
def test_versions_that_forget_replicas_or_save_nothing_are_seen(mutant, verdict):
    assert launch(as_predicted, 4, mutant) == [verdict] * 4


def test_more_shards_are_fewer_bytes_between_replicas():
    """2(R−1)/R · Ψ/S at stages 1 to 3."""
    psi = sum(p.nbytes for p in gpt().parameters())
    for stage in STAGES:
        few, many = (hybrid_traffic(gpt(), shards, 8 // shards, stage, bucket_bytes=BUCKET)["replicas"].total
                     for shards in (4, 2))
        assert few == pytest.approx(2 * 1 / 2 * psi / 4, rel=0.05)
        assert many == pytest.approx(2 * 3 / 4 * psi / 2, rel=0.05)


def test_bytes_of_a_thousand_ranks_without_them():
    dp, both = levels(FakeCommunicator(37, 1024), 8)
    engine, before = gpt_engine(3, dp, **both), both["replicas"].traffic
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    t = tracked(engine, tokens, tokens, steps=1)
    states = model_state_bytes(gpt(), 8, 3, rank=37 % 8)
    assert t.now["optimizer state"] == states["optimizer state"] and t.now["parameters"] == states["parameters"]
    assert both["replicas"].traffic - before == hybrid_traffic(gpt(), 8, 128, 3, rank=37)["replicas"]


def order_of_collectives(comm, stage):
    """[(level, bucket)] of this rank's reductions, as they begin, with "backward" of each layer among them."""
    engine, found = hybrid(stage, three_layers(), comm, bucket_bytes=300), []
    for level, kind in (("shards", "reduce_scatter"), ("replicas", "all_reduce")):
        given = getattr(getattr(engine.levels, level), kind)
        setattr(getattr(engine.levels, level), kind, lambda *args, level=level, given=given, label="", **options: (
            found.append((level, label)), given(*args, label=label, **options))[1])
    for i in (0, 2, 4):
        engine.model[i].weight.register_hook(lambda gradient, i=i: found.append(("backward", i)))
    engine.backward(square(engine, rows_of(comm, 0)))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_reduce_a_bucket_while_backward_goes_on(stage):
    for found in launch(order_of_collectives, 4, stage):
        kinds = [level for level, _ in found]
        assert kinds.count("replicas") == kinds.count("shards") > 1
        first_across, last_layer = kinds.index("replicas"), found.index(("backward", 0))
        assert first_across < last_layer  # the first layer's backward is still to come
        labels = {level: [label for each, label in found if each == level] for level in ("shards", "replicas")}
        assert labels["shards"] == labels["replicas"]


@pytest.mark.parametrize("name", ["unused on a rank", "frozen", "twice", "recomputed", "one small tensor"])
@pytest.mark.parametrize("stage", STAGES)
def test_other_models_train_as_with_one_level(stage, name):
    def on_a_model(comm, stage, name, shards):
        model = model_of(name)
        units = {"units": [model]} if stage == 3 and name == "unused on a rank" else {}  # all ranks run the same units
        engine = hybrid(stage, model, comm, shards, bucket_bytes=200, **units)
        return parameters_of(train(engine, 3, width=1 if name.startswith("one") else 10))
    plain = launch(on_a_model, 4, stage, name, None)[0]
    for ours in launch(on_a_model, 4, stage, name, 2):
        assert farthest(ours, plain) < 1e-6


def another_model(comm):
    hybrid(1, three_layers() if comm.rank < 2 else three_layers()[:3], comm)


def another_order(comm):
    """Replica 1 runs its units in another order."""
    model = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
    model.forward = lambda x: model[0](model[1](x)) if comm.rank >= 2 else model[1](model[0](x))
    train(hybrid(3, model, comm), 1)


@pytest.mark.parametrize(("body", "match"), [
    (another_model, r"ranks \[2, 3\] have another model than rank 0"),
    (another_order, "ranks 2 and 3 began other collectives than ranks 0 and 1")])
def test_replicas_that_differ_are_named(body, match):
    failure(match, body, 4, launch=launch)


@pytest.mark.parametrize(("which", "expected"), [
    ("one", "TypeError: replicas=None: expected both levels of comm"), ("number", "TypeError: shards=2: expected both"),
    ("stage 0", "TypeError: shards and replicas: DataParallel cuts nothing"),
    *((which, "ValueError: shards=Communicator(rank ") for which in ("twice", "whole", "crossed", "some"))])
@on_ranks(4)
def test_levels_that_are_none_are_refused_on_all_ranks(comm, which, expected):
    shards, replicas = levels(comm)[1].values()
    given = {"one": (shards, None), "number": (2, replicas), "twice": (shards, shards), "whole": (comm, shards),
             "stage 0": (shards, replicas), "crossed": (shards, comm.split([0, 3] if comm.rank in (0, 3) else [1, 2])),
             "some": (shards, replicas if comm.rank else shards)}[which]
    make = DataParallel if which == "stage 0" else Zero2
    with pytest.raises((TypeError, ValueError)) as error:
        make(three_layers(), comm, shards=given[0], replicas=given[1])
    assert f"{error.typename}: {error.value}".startswith(expected)


class FailsOnce(Layers):
    """Its first backward raises, on all ranks, between two layers."""

    fails = True

    def forward(self, x):
        x = self[0](x).tanh()
        x.register_hook(self.raising)
        return self[2](self[1](x).tanh()).tanh()

    def raising(self, gradient):
        if self.fails:
            self.fails = False
            raise ArithmeticError("injected")


def with_options(comm, stage, what, shards):
    """Parameters after three steps: of a step tried again, with a store, from the meta device, scaled, in bf16."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"store": {"store": Elsewhere()}, "host": {"update": functools.partial(ShardedUpdate, device="cpu")}}
    with torch.device("meta" if what == "meta" else "cpu"):
        model = FailsOnce(3) if what == "tried again" else three_layers(comm.rank)
    model = model.bfloat16() if what == "bf16" else model
    scaler = AdaptiveLossScaler(1024.0, comm=comm)
    torch.manual_seed(comm.rank)
    engine = hybrid(stage, model, comm, shards, bucket_bytes=300, **options.get(what, {}))
    for step in range(3):
        x = rows_of(comm, step).to(engine.buckets[0].dtype)
        x = x * float("inf") if what == "scaled" and step == 1 and comm.rank == 3 else x
        if what == "tried again" and step == 0:
            with pytest.raises(ArithmeticError):
                engine.backward(square(engine, x))
        if what == "scaled":
            engine.backward(scaler.scale(square(engine, x)))
            scaler.step(engine)
            scaler.update()
        else:
            update(engine, square(engine, x))
    return parameters_of(engine)


@pytest.mark.parametrize(("what", "stage"), [(what, stage) for stage in STAGES for what in (
    "tried again", "store", "host", "scaled", "bf16", *["meta"] * (stage == 3))])
def test_other_parts_work_as_with_one_level(what, stage):
    plain = launch(with_options, 4, stage, what, None)[0]
    for ours in launch(with_options, 4, stage, what, 2):
        assert farthest(ours, plain) < (1e-2 if what == "bf16" else 1e-6)


def dry(name):
    engine = hybrid(3, GPT(GPTConfig.named(name)), FakeCommunicator(37, 1024), 8)
    x = torch.zeros(1, 64, dtype=torch.int64)
    return traced(engine, lambda: engine.backward(engine.forward(x, x)))[0]


def test_a_dry_run_of_a_large_model():
    now = memory.dry_run(dry, "gpt2").result
    with torch.device("meta"):
        model = GPT(GPTConfig.named("gpt2"))
    states = model_state_bytes(model, 8, 3, rank=37 % 8)
    assert now["gradients"] == states["gradients"] and now["parameters"] == states["parameters"]
