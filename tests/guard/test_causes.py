"""Why a request failed: what a replay has shown, what grows, and modules that do not recompute."""

import pytest
import torch

from refimpl.guard.causes import causes
from refimpl.guard.failure import Facts
from refimpl.guard.known_bytes import KnownBytes

DEVICE = {"capacity": 1000, "allocated": 400, "reserved": 700, "free": 600, "largest free": 300, "by others": 0}


def found(name, models=(), **facts):
    known = KnownBytes()
    known.models = set(models)
    facts = Facts(0, 1, 5, "forward", known, **{"request": 420, "line": "train.py:3", "device": DEVICE, **facts})
    return [each for each in causes(facts) if each.name == name]


@pytest.mark.parametrize(("settings", "words"), [
    ({"expandable_segments:True": False, "max_split_size_mb:32": True}, "CONF=max_split_size_mb:32 lets this request"),
    ({"expandable_segments:True": False}, "none of the allocator's settings that were replayed lets"),
    ({}, "may keep free memory in one piece: it was not replayed")])
def test_a_setting_is_promised_where_a_replay_passed(settings, words):
    [cause] = found("fragmentation", settings=settings)
    assert words in cause.cure and cause.line == "train.py:3" and "largest piece has 300 B" in cause.what
    assert not found("fragmentation", settings=settings, request=700)
    nearly_full = DEVICE | {"allocated": 930, "reserved": 970, "free": 70, "largest free": 20}
    assert not found("fragmentation", settings=settings, request=50, device=nearly_full), "the table of settings tells"


def test_what_grows_is_said_of_the_traced_steps_or_else_of_the_series():
    traced = {"grows": [{"bytes": 8, "lines": ["a.py:1", "b.py:2"], "holder": "`kept`", "cure": ""}]}
    assert [str(each.what) for each in found("growth", growth=(7, 3))] == ["grows by 7 bytes a step since step 3"]
    [cause] = found("growth", growth=(7, 3), traced=traced)
    assert cause.what == "grows by 8 bytes a step since step 3, held by `kept`" and cause.line == "a.py:1 and b.py:2"
    assert "let it go" in cause.cure and not found("growth")


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_recomputation_is_off_where_it_was_asked_for_and_the_model_does_not_train(asked, training):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2)).train(training)
    model[0].gradient_checkpointing = asked
    assert bool(found("recomputation", [model])) == (asked and not training)


def test_others_are_named_where_they_have_what_is_missing():
    assert found("others", device=DEVICE | {"by others": 200, "free": 250})
    assert not found("others", device=DEVICE | {"by others": 100, "free": 400})
    assert not found("others", device=DEVICE | {"by others": 200, "free": 200})
