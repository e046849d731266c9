"""The bench of compression at a tiny size, and that it would show a hook that compresses nothing."""

from rank_pool import pooled

from benchmarks import compression
from refimpl.comm import Link

TINY = {"vocab_size": 256, "context_length": 16, "layers": 1, "hidden": 32, "heads": 2}


def test_a_run_reads_times_losses_and_bytes(run):
    settings, rows = run(compression, TINY, steps=3, rounds=1)
    algorithms = list(compression.RATIOS)
    assert settings["ranks"] == 2 and [row["what"].split(", ")[1] for row in rows[:6]] == algorithms
    assert rows[6]["peer"] == "powerSGD_hook" and all(row["value"] > 0 for row in rows)
    assert [row["peer"] for row in rows[7:13]] == ["arithmetic"] * 6 and all(row["ratio"] > 0.99 for row in rows[7:13])
    losses = [row for row in rows if row["what"].startswith("loss")]
    sent = [row for row in rows if row["what"].startswith("bytes")]
    assert len(losses) == 12 and [row["what"].split(", ")[1] for row in sent] == algorithms
    assert all(row["ratio"] < row["held"] + 0.02 for row in sent)  # whole vectors weigh more in a tiny model


def over_a_link(comm, dense):
    if dense:  # the mutant: a hook that sends all
        compression.RATIOS["topk"] = 1.0
    compression.LINK = Link(1e6, 0)
    return compression.times_of(comm, TINY, 2)


def test_a_hook_that_sends_all_is_seen():
    quick, slow = (min(compression.slowest(pooled(over_a_link, 2, dense))["topk"]) for dense in (False, True))
    assert slow > 2 * quick
