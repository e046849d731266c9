"""Ranks that hold the same compare it: a gradient that nobody sums is named before a step uses it."""

import functools
import time

import pytest
import torch
from net_kit import on_meta
from outside.models import GROUPED, causal

from refimpl.comm import CollectiveMismatch, simulate
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.offload import DiskStore
from refimpl.zero.internals import replicas
from refimpl.zero.internals.replicas import CHUNK, difference, numbers_of

MODEL = causal("qwen3", **GROUPED | {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4})
NORM = "model.layers.1.self_attn.q_norm.weight"
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def trained(comm, axes, options, fault=None, steps=1, dtype=torch.float32):
    """Return what the last step says, and whether parameters are as they were before it."""
    torch.manual_seed(0)
    model, tokens = MODEL().to(dtype), torch.randint(256, (4, 16))
    engine = together(model, Mesh(**axes).connect(comm), SGD, **options)
    engine.engine._steps = 100 - steps + 1 if steps > 1 else 0  # the last of them is the hundredth
    for step in range(steps):
        if fault and step == steps - 1:
            FAULTS[fault](engine, comm)
        engine.train_step(tokens, tokens)
        before = [shard.values.clone() for shard in engine.engine.shards()]
        try:
            engine.step()
        except CollectiveMismatch as error:
            after = [shard.values for shard in engine.engine.shards()]
            return str(error), all(map(torch.equal, before, after))
    return None


def no_sum(engine, comm):
    for name, p in engine.model.named_parameters():
        if name == NORM:
            p._backward_hooks.clear()


def other_value(engine, comm):
    if comm.rank == 3:  # the last one
        shard = next(shard for shard in engine.engine.shards() if shard.spec.name == NORM)
        shard.values[0] += 1


FAULTS = {"no sum": no_sum, "other value": other_value}
WHERE = [({"tp": 2, "dp": 2}, {"zero": zero}) for zero in (0, 1, 2, 3)] + [
    ({"tp": 2, "cp": 2}, {"zero": 2, "context": "ulysses"}), ({"tp": 2, "pp": 2}, {"micro_batches": 2}),
    ({"tp": 4}, {"zero": 3})]


@pytest.mark.parametrize(("axes", "options"), WHERE)
def test_a_gradient_that_nobody_sums_is_named_by_all_ranks(axes, options):
    answers = simulate(trained, Mesh(**axes).world_size, axes, options, "no sum")
    assert len({text for text, _ in answers}) == 1 and all(untouched for _, untouched in answers)
    assert answers[0][0].startswith(f"the gradient of {NORM} differs between ranks [")


@pytest.mark.parametrize(("axes", "options"), WHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_passes_in_the_first_step_and_the_hundredth(axes, options, dtype):
    assert simulate(trained, Mesh(**axes).world_size, axes, options, None, 2, dtype) == [None] * Mesh(**axes).world_size


def test_a_value_that_drifted_is_named_in_the_hundredth_step():
    answers = simulate(trained, 4, {"tp": 4}, {"zero": 1}, "other value", 2)
    assert answers[0][0].startswith(f"the gradient of {NORM}") or answers[0][0].startswith(f"the value of {NORM}")
    assert "ranks [3] from rank 0" in answers[0][0]


def test_states_in_a_store(tmp_path):
    assert simulate(stored, 4, tmp_path, None) == [None] * 4
    assert simulate(stored, 4, tmp_path, "no sum")[0][0].startswith(f"the gradient of {NORM}")


def stored(comm, folder, fault):
    (folder / f"{fault} {comm.rank}").mkdir()
    store = DiskStore(folder / f"{fault} {comm.rank}")
    try:
        return trained(comm, {"tp": 2, "dp": 2}, {"zero": 2, "store": store}, fault, steps=2)
    finally:
        store.close()


def test_numbers_do_not_depend_on_chunks_and_know_places():
    x = torch.randn(2 * CHUNK + 77)
    square, weighed = numbers_of(x)
    assert square == pytest.approx(x.double().square().sum().item(), rel=1e-12)
    assert weighed == pytest.approx((x.double() * torch.arange(len(x), dtype=torch.float64).cos()).sum().item())
    assert numbers_of(x.flip(0))[1] != pytest.approx(weighed, rel=1e-3)


@pytest.mark.parametrize(("mine", "theirs", "differ"), [
    ([1.0, 0.5], [1.0, 0.5], False), ([1.0, 0.5], [1.0, 0.5 + 1e-5], False), ([1.0, 0.5], [1.0, 0.6], True),
    ([1.0, 0.5], [4.0, 0.5], True), (None, [1.0, 0.5], True), (None, None, False), ([0.0, 0.0], [0.0, 0.0], False),
    ([float("nan"), 1.0], [float("nan"), 1.0], False), ([float("inf"), 1.0], [1.0, 1.0], True)])
def test_what_counts_as_a_difference(mine, theirs, differ):
    found = difference([[["w", [0, 0], [0, 1], 1e-3, each, [1.0, 1.0]]] for each in (mine, theirs)])
    assert (found is not None) == differ and (not differ or found[1] == [1])


def test_it_takes_less_than_a_hundredth_of_a_step():
    def seconds(comm):
        torch.manual_seed(0)
        model = on_meta("qwen3", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                        head_dim=64, intermediate_size=1024, vocab_size=2048)
        engine = together(type(model)(model.config), Mesh(tp=2).connect(comm), SGD, zero=1)
        tokens, read = torch.randint(2048, (2, 128)), []
        for _ in range(3):
            begin = time.process_time()
            engine.train_step(tokens, tokens)
            engine.step()
            read.append(time.process_time() - begin)
        engine.train_step(tokens, tokens)
        begin = time.process_time()
        engine.engine._steps = 0
        replicas.check_replicas(engine.engine)
        return min(read), time.process_time() - begin

    for step, check in simulate(seconds, 2):
        assert check / replicas.EVERY < 0.01 * step
