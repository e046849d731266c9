"""The table of what each technique does to the bytes of a step."""

from types import SimpleNamespace

import numpy as np
import pytest

from refimpl.common.ledger import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES
from refimpl.explain.helps import TECHNIQUES
from refimpl.explain.helps.effects import EFFECTS
from refimpl.explain.helps.row import Row, cut, dropped, packed, part
from refimpl.explain.recorded_timeline import RecordedTimeline
from refimpl.memory.storage_records import FORWARD, STEP

HELD = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, TEMPORARIES, TEMPORARIES)
PHASES = (FORWARD,) * 4 + (STEP, FORWARD)


def by_hand():
    """Make a timeline of a storage of each category and an update's temporary, of 80 bytes and so on."""
    timeline = object.__new__(RecordedTimeline)
    timeline.categories, timeline.rows = list(HELD), 20
    timeline.records = [SimpleNamespace(shape=(8,), phase=phase, born=i + 1, op="mul", module="", dtype="float32")
                        for i, phase in enumerate(PHASES)]
    timeline.born, timeline.freed = np.arange(1, 7), np.arange(11, 17)
    timeline.nbytes = np.array([80, 88, 96, 104, 112, 120])
    timeline.trace = SimpleNamespace(first_call=0)
    timeline.window, timeline.recording = slice(1, 20), SimpleNamespace(
        models=[], calls=[], steps=[19], uses=SimpleNamespace(masks=set()))
    return timeline


@pytest.mark.parametrize(("name", "spans"), [
    ("zero1", [(3, 13, -84), (5, 15, -112)]),
    ("zero2", [(2, 12, -77), (3, 13, -84), (5, 15, -112)]),
    ("zero3", [(1, 11, -70), (2, 12, -77), (3, 13, -84), (5, 15, -112)]),
    ("offload", [(2, 12, -88), (3, 13, -96), (5, 15, -112)]),
    ("data", [(4, 14, -91), (6, 16, -105)]),
    ("tensor", [(1, 11, -70), (2, 12, -77), (3, 13, -84), (4, 14, -91), (5, 15, -112), (6, 16, -105)]),
])
def test_the_spans_are_those_by_hand(name, spans):
    assert sorted(EFFECTS[name](by_hand()).spans) == spans


def test_what_is_not_there_is_said():
    timeline = by_hand()
    timeline.nbytes[2] = 0
    assert EFFECTS["zero1"](timeline) == f"there is nothing of {OPTIMIZER_STATE}"
    assert EFFECTS["chunks"](timeline) == "no model ran"


def test_what_is_packed_is_there_beside_a_storage_that_is_back():
    row = Row([packed(ACTIVATIONS, to=part(4), when=lambda timeline, records: [(i, 6, 12) for i in records])])
    assert sorted(row(by_hand()).spans) == [(6, 12, 26 - 104), (12, 14, 26)]


@pytest.mark.parametrize(("least", "most", "said"), [
    (part(2), part(2), ([(4, 14, -52)], "", False)),
    (part(2), part(104), ([(4, 14, -103)], "apart", True)),
    (lambda timeline, records: [55], part(2), ([(4, 14, -52)], "apart", False)),
])
def test_a_row_is_exact_where_the_least_and_the_most_are_near(least, most, said):
    timeline = by_hand()
    timeline.totals, timeline.peak = np.array([0] * 8 + [1000] + [0] * 11), 1000
    row = Row([cut(ACTIVATIONS, to=part(2))], loose=False, least=[cut(ACTIVATIONS, to=least)],
              most=[cut(ACTIVATIONS, to=most)], apart="apart")
    assert row(timeline) == said


def test_the_last_effect_decides_and_what_is_put_in_place_is_added():
    row = Row([cut(ACTIVATIONS), dropped(ACTIVATIONS)], [lambda timeline: [(1, 2, 3)]])
    assert row(by_hand()).spans == [(4, 14, -104), (1, 2, 3)]


def test_every_technique_has_its_row():
    assert list(EFFECTS) == [technique.name for technique in TECHNIQUES]
