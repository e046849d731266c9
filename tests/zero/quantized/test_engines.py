"""Engines that gather and reduce in blocks: bytes of the closed forms, shards that stay exact, losses, refusals."""

import functools

import pytest
import torch
from hsdp_kit import levels
from outside.models import GROUPED, causal
from quantized_bodies import bytes_of_steps, engine_of
from rank_pool import on_ranks
from zero_kit import SGD, equal, farthest, gpt, gradients_of_step, own_rows, parameters_of, token_batches, train_gpt
from zero_steps import gpt_engine, update

from refimpl.comm import FakeCommunicator, launch
from refimpl.comm.errors import CollectiveMismatch
from refimpl.data import TextData
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero3
from refimpl.zero.quantized import BlockCodec, QuantizedReduce
from refimpl.zero.quantized.closed_forms import mean_traffic

INT8, INT4 = BlockCodec(), BlockCodec(4, 64)
BOTH = {"weights": INT8, "gradients": INT8}
CASES = [(3, BOTH, 1), (3, {"weights": INT8}, 2), (3, {"gradients": INT4}, 2), (2, {"gradients": INT8}, 2),
         (1, {"gradients": INT8}, 2), (3, {"weights": INT4, "gradients": INT4, "persistence_threshold": 100}, 1)]


def test_bytes_on_the_wire():
    two_levels = [(3, {**BOTH, "ranks_per_machine": 2}, 1), (2, {"gradients": INT4, "ranks_per_machine": 2}, 1)]
    for world_size, cases in ((1, CASES[:1]), (2, CASES[1:4]), (4, CASES + two_levels)):
        for rank in launch(bytes_of_steps, world_size, cases):
            for sent, expected, _ in rank:
                assert sent == expected
    plain = launch(bytes_of_steps, 4, [(3, {}, 1)])[0][0][2]
    (*_, int8), (*_, int4) = rank[0], rank[5]
    assert int8 < 0.28 * plain and int4 < 0.18 * plain  # a quarter, an eighth, scales, and checks


class Decoded(BlockCodec):
    """The mutant: it rounds, and sends numbers of 4 bytes."""
    def payload_bytes(self, numel):
        return super().payload_bytes(numel) + 3 * numel // 16 * 16


def test_a_codec_that_saves_nothing_is_seen():
    (_, _, sent), (_, _, plain) = launch(bytes_of_steps, 2, [(3, {"weights": Decoded(), "gradients": Decoded()}, 1),
                                                             (3, {}, 1)])[0]
    assert sent > 0.95 * plain


def what_stays_exact(comm):
    """With a step of nothing, shards and what `gathered` shows are those of the model; a forward is rounded."""
    engine, model = engine_of(comm, 3, **BOTH, optimizer=functools.partial(torch.optim.SGD, lr=0.0)), gpt()
    exact, tokens = dict(model.named_parameters()), token_batches(2)
    train_gpt(engine, 1)
    kept = equal(parameters_of(engine), exact)
    rows = tokens[0][0][:4]
    rounded = engine(rows).sub(model(rows)).abs().max().item()
    with engine.gathered(write=True), torch.no_grad():
        for p in engine.model.parameters():
            p.add_(1)
    written = all(torch.equal(p, exact[name] + 1) for name, p in parameters_of(engine).items())
    loss = engine(rows, rows)
    with engine.gathered():  # between forward and backward
        pass
    engine.backward(loss)
    return kept, rounded, written


def test_shards_stay_exact_and_so_does_what_gathered_shows():
    for world_size in (1, 2):
        for kept, rounded, written in launch(what_stays_exact, world_size):
            assert kept and written and (1e-6 < rounded < 0.1 if world_size > 1 else rounded < 1e-6)


def nearly_the_same(comm):
    """How far a step of SGD is from one without codecs, relative to it; whether ranks agree to the bit."""
    start, found = {name: p.detach() for name, p in gpt().named_parameters()}, []
    _, both = levels(comm)
    for stage, codecs, more in ((0, {}, {}), (0, {"gradients": INT8}, {}), (1, {"gradients": INT8}, {}),
                                (2, {"gradients": INT8, "ranks_per_machine": 2}, {}), (3, BOTH, {}),
                                (0, {"gradients": INT4, "ranks_per_machine": 2}, {}), (3, BOTH, both),
                                (2, {"gradients": INT8}, {**both, "reduce_dtype": torch.bfloat16})):
        engine = engine_of(comm, stage, **codecs, optimizer=SGD, **more)
        before = both["replicas"].traffic.total
        gradients_of_step(engine)
        between = both["replicas"].traffic.total - before
        engine.step()
        after = parameters_of(engine)
        found.append(torch.cat([(after[name] - start[name]).flatten() for name in start]))
        wanted = sum(mean_traffic(INT8, bucket.shard_numel, 2).total for bucket in engine.buckets) if more else 0
        assert between == wanted
    exact, *rounded = found
    return [((each - exact).norm() / exact.norm()).item() for each in rounded], torch.stack(found)


def test_a_step_is_that_without_codecs_but_for_their_error():
    answers = launch(nearly_the_same, 4)
    errors = answers[0][0]
    assert all(torch.equal(updates, answers[0][1]) for _, updates in answers)
    int4 = errors.pop(4)
    assert max(errors) < 0.05 and int4 < 0.2 and min(*errors, int4) > 1e-4, (errors, int4)


@on_ranks(4)
def test_what_is_not_finite_is_seen_by_all_ranks(comm):
    """An inf on one rank: the scaler skips on all, which changes nothing, and the next step goes on."""
    for stage, codecs in ((3, {**BOTH, "ranks_per_machine": 2}), (2, {"gradients": INT4})):
        engine = engine_of(comm, stage, **codecs)
        scaler, found = AdaptiveLossScaler(init_scale=2.0, comm=comm), [parameters_of(engine)]
        rows = own_rows(comm, token_batches(1)[0, 0])
        for factor in (1.0 if comm.rank else float("inf"), 1.0):
            engine.backward(scaler.scale(engine(rows, rows)) * factor)
            scaler.step(engine)
            scaler.update()
            found.append(parameters_of(engine))
        assert scaler.skipped_steps == 1 and equal(*found[:2]) and 0 < farthest(*found[1:]) < 0.01


@on_ranks(4)
def test_ranks_with_other_options_are_named(comm):
    for other, what in (({}, "quantized_weights"), ({"weights": INT4}, "quantized_weights"),
                        ({"weights": INT8}, "hook"), ({"weights": INT8, "gradients": INT4}, "hook"),
                        ({**BOTH, "ranks_per_machine": 2}, "hook")):
        with pytest.raises(CollectiveMismatch) as error:
            engine_of(comm, 3, **other if comm.rank == 3 else BOTH)
        said = str(error.value)
        assert f"ranks [3] have another {what} than rank 0" in said and "BlockCodec(bits=8, block=256" in said


def test_what_is_no_codec():
    with pytest.raises(TypeError, match="quantized_weights=True: expected BlockCodec"):
        engine_of(fake(), 3, weights=True)
    with pytest.raises(TypeError, match="codec=8: expected a BlockCodec"):
        QuantizedReduce(8)
    with pytest.raises(ValueError, match="ranks_per_machine=3 of 4 ranks"):
        engine_of(fake(), 3, gradients=INT8, ranks_per_machine=3)
    engine = engine_of(fake(), 2, gradients=INT8)
    with pytest.raises(RuntimeError, match="another engine's hook already"):
        gpt_engine(3, fake(), hook=engine.reducer.hook)


def fake():
    return FakeCommunicator(0, 4)


SIZES = {"vocab_size": 256, "context_length": 32, "layers": 2, "hidden": 32, "heads": 4}


def learned(comm, name, steps, codec):
    """The mean loss of the last 20 steps on real text."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES)) if name == "gpt" else causal("llama", **{**GROUPED, "vocab_size": 256})()
    engine = Zero3(model, comm, functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99)),
                   quantized_weights=codec, hook=codec and QuantizedReduce(codec))
    warmup = torch.optim.lr_scheduler.LinearLR(engine, 0.05, total_iters=20)
    batches, losses = TextData().batches(4, 32, rank=comm.rank, world_size=comm.world_size, epochs=None), []
    for _, (x, y) in zip(range(steps), batches, strict=False):
        loss = engine(x, y) if name == "gpt" else engine(input_ids=x, labels=x, use_cache=False).loss
        update(engine, loss)
        warmup.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses), "avg")[-20:].mean().item()


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_it_learns_as_without_codecs(name):
    plain, ours = (launch(learned, 2, name, 104, codec)[0] for codec in (None, INT8))
    print(f"{name}: {plain:.4f} nats, with codecs {ours / plain:.4f} of that")
    assert plain < 0.75 * 5.545 and ours <= 1.01 * plain


@on_ranks(2)
def test_what_is_saved_is_as_without_codecs(comm, tmp_path):
    """Saved with codecs, loaded without, and the other way round: states are those that were saved, to the bit."""
    first, second = engine_of(comm, 3, **BOTH, steps=2), engine_of(comm, 2)
    first.save(str(tmp_path / "saved"))
    second.load(str(tmp_path / "saved"))
    third = engine_of(comm, 3, **BOTH)
    third.load_state_dict(second.state_dict())
    assert equal(parameters_of(first), parameters_of(second)) and equal(parameters_of(first), parameters_of(third))
    for engine in (first, third):
        train_gpt(engine, 1)
    assert equal(parameters_of(first), parameters_of(third))
