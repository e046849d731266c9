"""The bench of quantised collectives at a tiny size, and that it would show codecs that save nothing."""

import torch

from benchmarks import zero_quantized
from refimpl.zero.quantized import BlockCodec


class Wide(BlockCodec):
    """The mutant: numbers of 4 bytes travel."""

    def payload_bytes(self, numel):
        return super().payload_bytes(numel) + 3 * numel // 16 * 16


def test_a_run_reads_memory_times_bytes_errors_and_losses(monkeypatch, run):
    monkeypatch.setattr(zero_quantized, "WAYS", {**{name: zero_quantized.WAYS[name] for name in ("whole", "both int8")},
                                                 "wide": (Wide(), Wide(), None)})
    settings, rows = run(zero_quantized, steps=2, rounds=1, models=["gpt"], seeds=2)
    found = {row["what"]: row["ratio"] for row in rows}
    assert settings["ranks"] == 4 and len(found) == 2 + 2 + 3 + 4 and all(ratio > 0 for ratio in found.values())
    assert found["peak of a step above shards, both int8"] < 0.75
    assert found["bytes of a step of gpt, both int8"] < 0.28 and found["bytes of a step of gpt, wide"] > 0.95
    assert found["error of gpt's first mean gradient, both int8"] < 0.1
    losses = {row["what"].split(", ", 1)[1]: row for row in rows if row["what"].startswith("loss")}
    assert list(losses) == ["both int8", "wide", zero_quantized.CONTROL]
    for each in losses.values():  # two first steps from two seeds: far from each other, and little changed by a codec
        assert each["spread"] > 3 * max(map(abs, each["changes"])) > 0 and len(each["changes"]) == 2
    assert losses[zero_quantized.CONTROL]["held"] is None and losses["both int8"]["held"] == 1.01


def test_rows_of_a_gpu_are_those_of_the_codec(monkeypatch):
    class Found:
        def median(self, name):
            return {"triton": 1.0, "torch": 2.0}[name]

    def compare(calls, rounds):
        for call in calls.values():
            call()
        return Found()

    monkeypatch.setattr(zero_quantized, "compare", compare)
    monkeypatch.setattr(zero_quantized, "NUMBERS", 5000)
    for name in ("randn", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, make=make, **how: make(*shape, **{**how, "device": "cpu"}))
    rows = list(zero_quantized.codec_rows(1))
    assert len(rows) == 8 and {row["ratio"] for row in rows} == {0.5}
    assert rows[0]["what"] == "encode 0M numbers, bfloat16, int8" and rows[0]["rate"] == 10_000 + 5088
