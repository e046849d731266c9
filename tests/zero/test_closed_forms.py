"""Bytes and traffic of every stage, as measured and in closed form: no byte of difference."""

import dataclasses

import pytest
import torch
from torch import nn
from zero_kit import ADAMW, BUCKET, CONFIG, ENGINES, gpt, token_batches
from zero_steps import STATES, gpt_engine, states_of, traced, traced_gpt, update

from refimpl.comm import FakeCommunicator, launch, simulate
from refimpl.mesh import Mesh
from refimpl.zero import Zero1, Zero3
from refimpl.zero.closed_forms import hybrid_traffic, model_state_bytes, paper_bytes, saved_bytes, step_traffic


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_and_traffic_are_those_of_the_closed_forms(world_size, micro_batches):
    def readings(comm):
        return [traced_gpt(gpt_engine(stage, comm), 3, micro_batches)[:2] for stage in range(4)]

    model = gpt()
    for rank, found in enumerate(launch(readings, world_size)):
        for stage, (now, sent) in enumerate(found):
            expected = model_state_bytes(model, world_size, stage, rank=rank, bucket_bytes=BUCKET)
            assert {name: now[name] for name in STATES} == dict(expected), stage
            assert dict(sent) == dict(step_traffic(model, world_size, stage, rank=rank, micro_batches=micro_batches,
                                                   bucket_bytes=BUCKET)), stage


@pytest.mark.parametrize(("vocabulary", "stays"), [(64, True), (192, True), (224, False), (1024, False)])
def test_a_large_head_is_freed_before_backward(vocabulary, stays):
    """So its bytes are not there with the gradients of logits; one more gather is the price."""
    model, nbytes = gpt(dataclasses.replace(CONFIG, vocab_size=vocabulary, tied=False)), []
    engine = Zero3(model, FakeCommunicator(0, 4), ADAMW)
    (head,) = engine.parameters.of_unit[model.head]

    def gradients():
        for tokens in token_batches(1, 2)[0]:
            loss = engine(tokens, tokens)
            nbytes.append(engine.gathering.whole[head].untyped_storage().nbytes())
            engine.backward(loss)

    for _ in range(3):
        _, sent, _ = traced(engine, gradients)
    assert nbytes[1:] == 5 * [stays * head.nbytes]  # the first step does not know what comes next
    assert dict(sent) == dict(step_traffic(model, 4, 3, micro_batches=2))


def test_16_bit_parameters_in_shards_rest_as_their_masters_alone():
    found = [model_state_bytes(nn.Linear(8, 8, bias=False, dtype=dtype), 4, 3, optimizer="sgd")
             for dtype in (torch.bfloat16, torch.float32)]
    one_element, shard = (2, 4), 8 * 8 // 4 * 4
    assert [each["parameters"] for each in found] == [one_element[0], one_element[1] + shard]
    assert [each["optimizer state"] for each in found] == [shard, 0]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_16_bit_parameters(stage, reduce_dtype):
    now, model = states_of(stage, torch.bfloat16, reduce_dtype), gpt(dtype=torch.bfloat16)
    expected = model_state_bytes(model, 4, stage, bucket_bytes=BUCKET, reduce_dtype=reduce_dtype)
    assert {name: now[name] for name in STATES} == dict(expected)
    psi = sum(p.numel() for p in model.parameters())
    of_a_gradient = 4 if stage and reduce_dtype == torch.float32 else 2
    gradients = psi * of_a_gradient / (4 if stage > 1 or of_a_gradient == 4 else 1)
    assert gradients <= expected["gradients"] <= 1.02 * gradients  # and padding


@pytest.mark.parametrize("threshold", [0, 33, 10_000])
def test_bytes_and_traffic_of_parameters_that_stay(threshold):
    now, model = states_of(3, persistence_threshold=threshold), gpt()
    expected = model_state_bytes(model, 4, 3, persistence_threshold=threshold)
    assert {name: now[name] for name in STATES} == dict(expected)
    sent = [step_traffic(model, 4, 3, persistence_threshold=each).total for each in (0, threshold)]
    assert sent[1] <= sent[0] and (sent[1] < 0.7 * sent[0]) == (threshold == 10_000)


def test_hybrid_traffic_is_by_default_that_of_rank_0():
    """Of two replicas of two shards each: other ranks send another number of bytes in checks."""
    def sent(comm):
        mesh = Mesh(dp=4, shards=2).connect(comm)
        both = {kind: mesh.get_parallel_group(kind) for kind in ("shards", "replicas")}
        engine, x = Zero1(nn.Linear(3, 3), mesh.get_parallel_group("dp"), **both), torch.ones(1, 3)
        before = []
        for _ in range(2):
            before = [each.traffic for each in (*both.values(), engine.comm)]
            update(engine, engine(x).sum())
        shards, replicas, whole = (each.traffic - of for each, of in zip((*both.values(), engine.comm), before,
                                                                         strict=True))
        return {"shards": shards, "replicas": replicas, "all": whole - shards - replicas}  # groups count in the whole

    first, other, *_ = simulate(sent, 4)
    assert first == hybrid_traffic(nn.Linear(3, 3), 2, 2, 1) and first["all"] != other["all"]


def test_saved_bytes_are_by_default_those_of_a_cpu(tmp_path):
    for stage, make in enumerate(ENGINES):
        engine = make(nn.Linear(3, 3), FakeCommunicator(0, 1))
        update(engine, engine(torch.ones(1, 3)).sum())
        engine.save(tmp_path / f"{stage}")
        written = {path.name: path.stat().st_size for path in (tmp_path / f"{stage}").glob("*/*.safetensors")}
        assert written == saved_bytes(nn.Linear(3, 3), 1, stage)


def test_the_papers_table_1():
    """Rajbhandari et al. 2020, table 1: 7.5B, 128B and 1T parameters, GB on each rank."""
    for N, rows in {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
                    256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}.items():
        for stage, GB in zip((1, 2, 3), rows, strict=True):
            assert paper_bytes(7.5e9, N, stage) / 1e9 == pytest.approx(GB, rel=0.01, abs=0.006)
    assert paper_bytes(1e12, 1024, 3) / 1e9 == pytest.approx(15.6, rel=0.01)
    assert paper_bytes(128e9, 64, 2) / 1e9 == pytest.approx(284, rel=0.01)


def test_what_is_unknown_is_named():
    for function in (lambda: paper_bytes(1e9, 4, 4), lambda: model_state_bytes(gpt(), 4, "3")):
        with pytest.raises(ValueError, match="stage=.*: expected 0 .DataParallel., 1, 2 or 3"):
            function()
    with pytest.raises(ValueError, match="optimizer='adamx': expected one of sgd, momentum, adam, adamw"):
        model_state_bytes(gpt(), 4, 1, optimizer="adamx")
