"""The ledger: its names, its arithmetic, and how it shows itself."""

import numpy as np
import pytest
import torch

from refimpl.memory import CATEGORIES, Ledger, beside, human, mark, track


def test_total_and_lookup():
    ledger = Ledger({"parameters": 8, "optimizer_state": 16}, activations=0)
    assert ledger.total == 24 == sum(ledger.values()) and ledger["optimizer state"] == ledger["optimizer_state"] == 16
    assert ledger["activations"] == 0 and "activations" not in ledger
    assert ledger == {"parameters": 8, "optimizer state": 16} == ledger
    assert ledger == {"parameters": 8, "optimizer_state": 16, "inputs": 0}
    assert "optimizer_state" in ledger and "optimizer state" in ledger
    assert hash(ledger) == hash(Ledger(parameters=8, optimizer_state=16))


def test_an_unknown_category_is_an_error_that_names_it():
    with pytest.raises(KeyError, match="no category 'activation' in this ledger; it has parameters"):
        Ledger(parameters=1)["activation"]


@pytest.mark.parametrize(("name", "meant"), [
    ("params", "parameters"), ("parameter", "parameters"), ("paramters", "parameters"), ("Parameters", "parameters"),
    ("grads", "gradients"), ("gradient", "gradients"), ("act", "activations"), ("activaitons", "activations"),
    ("optimizer", "optimizer state"), ("optimizer_states", "optimizer state"), ("temporary", "temporaries"),
    ("input", "inputs"), ("buffer", "buffers"), ("comm", "communication")])
def test_a_category_that_is_nearly_a_known_one_is_refused(name, meant):
    for refused in (lambda: Ledger({name: 3}), lambda: mark(torch.zeros(1), name)):
        with pytest.raises(ValueError, match=f"category '{name}': is it '{meant}'"):
            refused()
    assert name not in Ledger(parameters=1) and Ledger(parameters=1) != {name: 3}


@pytest.mark.parametrize("name", [
    "kernel workspace", "parameter shard", "gradient buckets", "norm inputs", "head input", "paged out", "in", "s", "",
    "values", "positions", "optimizer averages", "copies of parameters", "comm buffers"])
def test_any_other_category_is_taken_as_it_is(name):
    assert list(Ledger({name: 3, "parameters": 1})) == ["parameters", name]


@pytest.mark.parametrize("count", [1.5, float("nan"), float("inf"), "12", None])
def test_bytes_are_whole_numbers(count):
    with pytest.raises(ValueError, match=f"parameters={count!r}: expected a "):
        Ledger(parameters=count)
    assert Ledger(parameters=8.0, inputs=torch.tensor(3), buffers=np.int64(2)).total == 13


def test_ledgers_add_and_subtract():
    peak, start = Ledger(parameters=10, activations=5), Ledger(parameters=10, inputs=2)
    assert peak - start == {"activations": 5, "inputs": -2} and (peak - start).total == peak.total - start.total
    assert peak + start == {"parameters": 20, "activations": 5, "inputs": 2} and peak != start and peak != 15


def test_dicts_take_part_on_either_side():
    peak, known = Ledger(optimizer_state=10, activations=5), {"optimizer_state": 4, "zebra": 1}
    assert peak - known == {"optimizer state": 6, "activations": 5, "zebra": -1}
    assert known - peak == {"optimizer state": -6, "activations": -5, "zebra": 1}
    assert peak + known == known + peak == {"optimizer state": 14, "activations": 5, "zebra": 1}
    assert all(isinstance(made, Ledger) for made in (peak - known, known - peak, known + peak))
    assert sum([peak, peak], Ledger()) == {"optimizer state": 20, "activations": 10}
    for wrong in (lambda: peak - 3, lambda: 3 - peak, lambda: peak + 3, lambda: 3 + peak, lambda: peak - [("a", 1)]):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()


def test_rows_keep_one_order_through_arithmetic():
    """Not that of a set, which changes from one process to the next."""
    marked = [f"of its own {i}" for i in range(20)]
    first, second = Ledger(dict.fromkeys(marked[:12], 2)), Ledger(dict.fromkeys(marked[8:], 1))
    assert list(first + second) == list(first - second) == marked and list(second - first) == marked[8:] + marked[:8]
    assert hash(first + second) == hash(second + first) and first + second == second + first


def test_categories_have_one_order_and_marked_ones_come_last():
    ledger = Ledger({"zebra": 1, "temporaries": 1, "communication": 1, "parameters": 1})
    assert list(ledger) == ["parameters", "communication", "temporaries", "zebra"]
    assert list(Ledger(dict.fromkeys(reversed(CATEGORIES), 1))) == list(CATEGORIES) == [
        "parameters", "buffers", "optimizer state", "gradients", "inputs", "activations", "communication",
        "temporaries"]
    assert len(ledger) == 4 and len(Ledger(parameters=0, zebra=0)) == 0


def test_text_table_has_bytes_and_a_readable_size():
    _, first, second, *_, last = str(Ledger(parameters=2 * 2**30, activations=1536)).splitlines()
    assert first.split() == ["parameters", "2,147,483,648", "2.0", "GiB"]
    assert second.split() == ["activations", "1,536", "1.5", "KiB"] and last.split()[:2] == ["total", "2,147,485,184"]


def test_two_ledgers_side_by_side_show_the_difference():
    table = beside(predicted=Ledger(parameters=10, inputs=3), measured={"parameters": 10, "activations": 1})
    assert table.rows() == [("parameters", (10, 10, 0)), ("inputs", (3, 0, -3)), ("activations", (0, 1, 1)),
                            ("total", (13, 11, -2))]
    assert "difference" in str(table).splitlines()[0]
    html = table._repr_html_()
    assert html.count("<tr>") == 5 and "<th style='text-align:right'>-2</th>" in html
    with track() as t:
        torch.zeros(25)
    assert beside(measured=t).rows() == [("temporaries", (100,)), ("total", (100,))]
    assert beside(a=Ledger(inputs=1), b=Ledger(inputs=2), c=Ledger(inputs=3)).headers() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="at least one ledger"):
        beside()


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (112 * 2**30, "112.0 GiB"), (-2048, "-2.0 KiB"),
    (5 * 2**40, "5.0 TiB"), (2**55, "32,768.0 TiB")])
def test_human(nbytes, text):
    assert human(nbytes) == text
