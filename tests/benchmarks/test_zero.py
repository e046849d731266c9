"""The bench of ZeRO at a tiny size, and that it would show a stage that saves nothing."""

import functools

import pytest

from benchmarks import zero
from refimpl.comm import launch
from refimpl.model import GPTConfig
from refimpl.zero import Zero2
from refimpl.zero.reducer import ReduceScatterAtOnce

TINY = GPTConfig(vocab_size=64, context_length=16, layers=4, hidden=128, heads=4)


class Hoarding(ReduceScatterAtOnce):
    def reduced(self, bucket, shard):
        self.hoard = [*getattr(self, "hoard", []), self.flat[bucket]]
        super().reduced(bucket, shard)


class GradientsKept(Zero2):
    """The mutant: whole gradients stay."""

    reducer_type = Hoarding


def test_a_run_reads_bytes_and_times_of_every_pair(run):
    settings, rows = run(zero, TINY, world=2, rounds=2, models=())
    added, rows = (list(filter(lambda row: row["what"].startswith("added") is so, rows)) for so in (True, False))
    assert [row["peer"] for row in added] == [zero.FSDP2] and 0 < added[0]["value"] < 8
    assert settings["parameters"] == TINY.parameter_count() and settings["ranks"] == 2
    assert [(row["what"].split(", ")[1], row["peer"]) for row in rows] == zero.PAIRS * 2
    states = {"DataParallel": 16, "Zero1": 12, "Zero2": 10, "Zero3": 8, zero.ALONE: 8}  # of 2 ranks, with gradients
    for row in rows[: len(zero.PAIRS)]:
        name = row["what"].split(", ")[1]
        assert states[name] < row["value"] < states[name] + 8 and row["unit"] == "B/parameter"
        assert row["bound"] == zero.BYTES_HELD.get((name, row["peer"]))
        # What is held between two steps: no gradients. DDP keeps its buckets, 4 bytes.
        held = 12 if name == "DataParallel" else 6 if "Zero3" in name else 8
        assert row["ours"]["resident"] == pytest.approx(held, abs=0.01)
        assert row["theirs"]["resident"] == pytest.approx(held + 4 * ("Zero3" not in name), abs=0.6)
        assert set(row["ours"]["names"]) <= set(row["ours"]["live"]) and "whole or its" in str(row["ours"]["names"])
        assert row["ours"]["held"] == pytest.approx(row["ours"]["resident"], rel=0.01)
    assert all(row["value"] > 0 and row["paired"] > 0 and row["unit"] == "s" for row in rows[len(zero.PAIRS):])


def test_a_stage_that_keeps_gradients_is_seen():
    """In a rank the table of engines is the module's own: the mutant is put into it there."""
    parameters = TINY.parameter_count()
    right, kept = (launch(mutated, 2, mutant)[0] for mutant in (Zero2, GradientsKept))
    assert kept["resident"] >= right["resident"] + 4 * parameters
    assert kept["tracker"] > right["tracker"]


def test_bytes_that_an_instrument_missed_end_the_reading(monkeypatch):
    monkeypatch.setattr(zero, "launch", lambda *args, **how: [{"Zero2": {"held": 102, "resident": 100}}])
    with pytest.raises(RuntimeError, match="Zero2: .* holds 102 bytes, the tracker 100: expected the same within 1 %"):
        zero.bytes_held(["Zero2"], "cpu", TINY, 2)


def mutated(comm, mutant):
    zero.ENGINES["Zero2"] = functools.partial(zero.Ours, mutant)
    return zero.bytes_of(comm, "Zero2", TINY)


def test_engines_in_the_same_ranks_are_read_as_if_alone():
    names = ["DataParallel", zero.LEAN, "Zero2", "Zero3"]
    together = zero.bytes_held(names, "cpu", TINY, 2)
    for name in names[2:]:
        alone = zero.bytes_held([name], "cpu", TINY, 2)[name]
        assert {kind: alone[kind] for kind in zero.KINDS} == pytest.approx(
            {kind: together[name][kind] for kind in zero.KINDS}, rel=1e-3)
