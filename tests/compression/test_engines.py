"""The hook in each engine: bytes on the wire by their closed form, ranks that stay equal, and what a step means."""

import functools

import pytest
import torch
from compression_kit import FLAT, engine_of, trained
from rank_pool import on_ranks, pooled
from zero_kit import BUCKET, ENGINES, FAST, equal, farthest, gpt, gradients_of_step, parameters_of, token_batches

from refimpl.comm import FakeCommunicator
from refimpl.comm.errors import CollectiveMismatch
from refimpl.comm.traffic import Traffic
from refimpl.compression import GradientCompressor
from refimpl.compression.closed_forms import gradient_traffic, residual_bytes
from refimpl.mixed_precision import AdaptiveLossScaler

CASES = [(stage, name) for stage in range(4) for name in FLAT] + [(0, "powersgd"), (1, "powersgd")]
EVERY_STAGE = pytest.mark.parametrize("stage", range(4))


def in_turn(case, *choices):
    """Return one of two, so that each stage and each algorithm has both."""
    stage, algorithm = case
    return choices[(stage + [*FLAT, "powersgd"].index(algorithm)) % 2]


@pytest.mark.parametrize(("stage", "algorithm", "world_size", "micro_batches"), [
    *((*case, 2, 1) for case in CASES), *((*case, *in_turn(case, (4, 1), (2, 2))) for case in CASES)])
def test_bytes_on_the_wire(stage, algorithm, world_size, micro_batches):
    """What is sent is what an engine without a hook sends, less the gradients, and the payloads."""
    found = pooled(trained, world_size, stage, algorithm, 0.1, 2, micro_batches)
    for parameters, sent, expected, without, dense in found:
        assert equal(parameters, found[0][0])
        gradients = dense * (world_size - 1) // world_size * (1 if stage else 2)
        rest = Traffic(without) - Traffic({"reduce_scatter" if stage else "all_reduce": gradients})
        assert Traffic(sent) == rest + Traffic(expected)
        assert sum(expected.values()) < (0.9 if stage == 0 and world_size == 4 else 0.5) * gradients


class Padded(GradientCompressor):
    """The mutant: compressed, and sent as zeros and numbers."""

    def all_reduce(self, key, flat, dtype, label):
        handle = super().all_reduce(key, flat, dtype, label)
        self.comm.all_reduce(flat)
        return handle


@on_ranks(2)
def test_a_hook_that_sends_all_is_seen(comm):
    engine, before = engine_of(comm, 0, hook := Padded("topk", 0.1)), comm.traffic
    gradients_of_step(engine, token_batches(1)[0])
    engine.step()
    assert (comm.traffic - before).total > 4 * gradient_traffic(hook, hook.layouts, 2, comm.rank).total


@EVERY_STAGE
@pytest.mark.parametrize("micro_batches", [1, 3])
@on_ranks(2)
def test_a_ratio_of_one_trains_as_without_a_hook(comm, stage, micro_batches):
    """With a ratio of 1 nothing is left out."""
    found = []
    for hook in (GradientCompressor("topk", 1.0), None):
        engine = engine_of(comm, stage, hook)
        for tokens in token_batches(3, micro_batches):
            gradients_of_step(engine, tokens)
            engine.clip_grad_norm_(0.5)
            engine.step()
        found.append(parameters_of(engine))
    assert farthest(*found) < 1e-6


@EVERY_STAGE
@on_ranks(2)
def test_clipping_is_of_what_was_sent(comm, stage):
    """The norm that clipping reads is that of what was sent: of the averages, whole or in shards."""
    engine = engine_of(comm, stage, GradientCompressor("topk", 0.1))
    gradients_of_step(engine, token_batches(1)[0])
    assert engine.clip_grad_norm_(1e-3) > 1e-2
    total = sum(x.float().square().sum() for each in engine.gradients() for x in each)
    total = comm.all_reduce(total) if stage else total
    assert total.item()**0.5 == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 3), (3, 3)])
@on_ranks(2)
def test_micro_batches_are_compressed_once_where_gradients_are_whole(comm, stage, times):
    """As their sum."""
    calls = []

    class Counting(GradientCompressor):
        def compensated(self, key, *args):
            calls.append(key)
            return super().compensated(key, *args)

    engine = engine_of(comm, stage, Counting("topk", 0.1))
    gradients_of_step(engine, token_batches(1, 3)[0])
    assert len(calls) == times * len(engine.buckets)


def dropped(engine, tokens, comm):
    gradients_of_step(engine, tokens)
    engine.zero_grad()


def overflown(engine, tokens, comm):
    """An inf on one rank, in one bucket; the loss scaler skips on all ranks."""
    scaler = AdaptiveLossScaler(init_scale=2.0, comm=comm)
    rows = tokens[0].chunk(comm.world_size)[comm.rank]
    engine.backward(scaler.scale(engine.forward(rows, rows)) * (float("inf") if comm.rank else 1.0))
    scaler.step(engine)
    scaler.update()
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize(("stage", "algorithm", "break_it"), [
    (*case, in_turn(case, dropped, overflown)) for case in CASES])
@on_ranks(2)
def test_a_step_that_is_not_made_leaves_no_trace(comm, stage, algorithm, break_it):
    """One run has a batch whose step is not made, one has no such batch."""
    found = []
    for broken in (True, False):
        engine = engine_of(comm, stage, hook := GradientCompressor(algorithm, 0.1))
        for i, tokens in enumerate(token_batches(4)):
            if i != 2:
                gradients_of_step(engine, tokens)
                engine.step()
            elif broken:
                break_it(engine, tokens, comm)
        found.append((parameters_of(engine), hook.state_tensors()))
    (parameters, state), (expected, kept) = found
    assert equal(parameters, expected) and equal(state, kept)


def scaled(comm, stage, aware):
    """Losses times a scale that changes, against losses as they are."""
    found = []
    for scales in ((1.0,) * 4, (8.0, 8.0, 2.0, 64.0)):
        now = [1.0]
        hook = GradientCompressor("topk", 0.1, loss_scale=functools.partial(now.__getitem__, 0) if aware else None)
        engine = engine_of(comm, stage, hook)
        for now[0], tokens in zip(scales, token_batches(4), strict=True):
            rows = tokens[0].chunk(comm.world_size)[comm.rank]
            engine.backward(engine.forward(rows, rows) * now[0])
            for each in engine.gradients():
                torch._foreach_div_(each, now[0])
            engine.step()
        found.append(parameters_of(engine))
    return farthest(*found)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_residual_follows_the_loss_scale(stage):
    assert max(pooled(scaled, 2, stage, True)) < 1e-7
    assert min(pooled(scaled, 2, stage, False)) > 1e-5  # the mutant: what was kept is in units of the scale before


@EVERY_STAGE
@on_ranks(2)
def test_warm_up_sends_all(comm, stage):
    engine, plain = engine_of(comm, stage, GradientCompressor("topk", 0.1, warmup=2)), engine_of(comm, stage)
    for step, tokens in enumerate(token_batches(3)):
        sent = []
        for each in (engine, plain):
            before = comm.traffic
            gradients_of_step(each, tokens)
            each.step()
            sent.append((comm.traffic - before).total)
        assert (sent[0] < sent[1]) == (step == 2)
        assert equal(parameters_of(engine), parameters_of(plain)) == (step < 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_powersgd_is_refused_where_gradients_are_not_whole(stage):
    with pytest.raises(TypeError, match=f"powersgd.*needs whole gradients, and stage {stage}"):
        engine_of(FakeCommunicator(0, 2), stage, GradientCompressor("powersgd"))


@pytest.mark.parametrize("other", [None, GradientCompressor("int8"), GradientCompressor("topk", 0.2)])
@on_ranks(2)
def test_ranks_with_other_hooks_are_named(comm, other):
    words = r"ranks \[1\] have another hook than rank 0: rank 0: GradientCompressor\(topk, ratio 0.1"
    with pytest.raises(CollectiveMismatch, match=words):
        engine_of(comm, 1, other if comm.rank else GradientCompressor("topk", 0.1))


def test_a_hook_belongs_to_one_engine():
    hook = GradientCompressor("topk")
    engine_of(FakeCommunicator(0, 2), 0, hook)
    with pytest.raises(RuntimeError, match="another engine's hook already: make one for each engine"):
        engine_of(FakeCommunicator(0, 2), 0, hook)


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_kept_takes_the_bytes_of_its_closed_form(stage):
    hook = GradientCompressor("topk", 0.1)
    engine = engine_of(FakeCommunicator(0, 2), stage, hook)
    for tokens in token_batches(2):
        gradients_of_step(engine, tokens)
        held = sum(x["residual"].nbytes for of in (hook.kept, hook._pending) for x in of.values())
        assert held == residual_bytes(hook, hook.layouts, before_step=bool(hook.kept))
        engine.step()
        kept = sum(x["residual"].untyped_storage().nbytes() for x in hook.kept.values())
        assert kept == residual_bytes(hook, hook.layouts) and not hook._pending


def low(comm, stage):
    hook = GradientCompressor("topk", 0.1)
    engine = ENGINES[stage](gpt(dtype=torch.bfloat16), comm, FAST, bucket_bytes=BUCKET, hook=hook)
    before, losses = comm.traffic, []
    for tokens in token_batches(8):
        rows = tokens[0].chunk(comm.world_size)[comm.rank] * 0 + torch.arange(16)
        loss = engine.forward(rows, rows)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sent = (comm.traffic - before)["all_to_all" if stage else "all_gather"]
    wanted = gradient_traffic(hook, hook.layouts, comm.world_size, comm.rank, bool(stage), torch.bfloat16).total
    return losses, sent - 8 * wanted, hook.kept[0]["residual"].dtype, parameters_of(engine)


@EVERY_STAGE
def test_numbers_of_16_bits_travel_in_16_bits_and_the_residual_is_in_32(stage):
    (losses, off, residual, ours), (_, _, _, others) = pooled(low, 2, stage)
    assert losses[-1] < 0.8 * losses[0] and residual is torch.float32 and equal(ours, others)
    assert off == 0 if stage else 0 <= off < 8 * 400  # stage 0 gathers the checks besides


@pytest.mark.parametrize(("stage", "algorithm"), CASES)
@on_ranks(1)
def test_one_rank_alone_compresses_too(comm, stage, algorithm):
    _, sent, expected, _, _ = trained(comm, stage, algorithm)
    assert sum(expected.values()) == sum(sent.values()) == 0
