"""The bench of recall at a tiny size: the task is what it says, and a mask without a path cannot solve it."""

import pytest
import torch

from benchmarks import measurement, recall, recall_many

TINY = recall.Size(T=256, span=64, pairs=8, values=4, hidden=32, batch=8, steps=60, lr=1e-2, tested=4)


def test_each_question_is_a_key_of_a_pair_far_before_and_its_answer_follows_that_key():
    size = recall.Size()
    tokens, questions, answers, places = recall.draw(size, 3, torch.Generator().manual_seed(0))
    assert tokens.shape == (3, 2048) and questions.shape == answers.shape == places.shape == (3, 32)
    asked, key, value = (tokens.gather(1, at) for at in (questions, places - 1, places))
    assert torch.equal(asked, key) and torch.equal(value - size.pairs, answers) and asked.max() < size.pairs
    assert (asked.sort().values == torch.arange(32)).all(), "each key once"
    away = questions - places
    assert away.min() >= 1024 and 1450 < away.float().mean() < 1620 and away.float().std() > 100
    others = tokens.clone().scatter_(1, questions, 99).scatter_(1, places, 99).scatter_(1, places - 1, 99)
    assert (others >= size.pairs + size.values).all(), "all else is filler: no answer stands beside its question"
    assert abs((answers == 0).float().mean() - 1 / 32) < 0.04


def test_a_path_over_layers():
    T, one = 8, torch.eye(8, dtype=torch.bool)[None]
    near = one | one.roll(-1, 2) & torch.ones(T, T, dtype=torch.bool).tril()  # itself and the one before
    questions, places = torch.tensor([[3, 7, 5]]), torch.tensor([[2, 5, 6]])
    for layers, share in ((1, 1 / 3), (2, 2 / 3), (3, 2 / 3)):
        assert recall.reached([near] * layers, questions, places) == pytest.approx(share)
    assert recall.reached([one, near], questions, places) == pytest.approx(1 / 3)


def test_a_run_reads_accuracies_beside_chance_and_paths(run, monkeypatch):
    monkeypatch.setattr(recall, "WINDOW", 32)
    monkeypatch.setattr(recall, "KERNEL", "tiled")
    learn = ("dense", "window", "BigBird", "native sparse")
    settings, rows = run(recall, TINY, kinds={name: recall.KINDS[name] for name in learn}, seeds=(0,))
    assert settings["chance"] == 0.25 and {row["peer_value"] for row in rows} == {0.25}
    by_name = {row["what"].split(", ")[1]: row for row in rows}
    assert by_name["dense"]["value"] >= 0.95 and "reached" not in by_name["dense"]
    assert by_name["window"]["value"] < 0.5 and by_name["window"]["reached"] == 0
    assert by_name["native sparse"]["value"] >= 0.95 and by_name["native sparse"]["reached"] == 1, "8 blocks of 8"
    assert 0 < by_name["BigBird"]["reached"] <= 1 and by_name["dense"]["steps"] < 60 == by_name["window"]["steps"]


def test_one_that_is_not_causal_is_named_and_others_step(run, monkeypatch):
    monkeypatch.setattr(recall, "KERNEL", "tiled")
    others = {name: recall.KINDS[name] for name in ("linear", "gated delta rule", "Linformer", "window and globals")}
    rows = run(recall, TINY._replace(steps=1, batch=1, tested=1), kinds=others, seeds=(0,))[1]
    assert [row.get("note") for row in rows] == [None, None, "not causal", None]


def test_the_record_holds_what_is_claimed_by_three_seeds():
    rows = measurement("recall", "cpu")["rows"]
    for name, (least, most) in recall.WITHIN.items():
        found = [row["value"] for row in rows if row["what"].startswith(f"recall, {name}, ")]
        assert len(found) == 3 and least <= min(found) and max(found) <= most, name
    by_path = [row for row in rows if "reached" in row]
    assert len(by_path) == 12 and all(row["value"] <= row["reached"] + 0.1 for row in by_path)  # chance is 0.03


def test_many_keys_are_the_same_task_and_are_held_to_no_expectation_of_few(run, monkeypatch):
    monkeypatch.setattr(recall, "KERNEL", "tiled")
    assert recall_many.SIZE._replace(pairs=32) == recall.Size() and recall_many.SIZE.pairs > 64, "columns of a state"
    tokens, questions, _, _ = recall.draw(recall_many.SIZE, 1, torch.Generator().manual_seed(0))
    assert (tokens[0, questions[0]].sort().values == torch.arange(128)).all()
    rows = run(recall_many, TINY._replace(steps=1, batch=1, tested=1), kinds=("native sparse", "dense"), seeds=(0,))[1]
    assert [row["what"] for row in rows] == ["recall, native sparse, seed 0", "recall, dense, seed 0"]
    assert not any("within" in row for row in rows)
