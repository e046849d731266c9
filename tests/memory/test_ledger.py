import pytest

from refimpl.memory import Ledger, beside, human


def test_total_and_lookup():
    ledger = Ledger({"parameters": 8, "optimizer_state": 16}, activations=0)
    assert ledger.total == 24 == sum(ledger.values())
    assert ledger["optimizer state"] == ledger["optimizer_state"] == 16
    assert ledger["activations"] == 0 and "activations" not in ledger
    assert ledger == {"parameters": 8, "optimizer state": 16}
    assert hash(ledger) == hash(Ledger(parameters=8, optimizer_state=16))


def test_an_unknown_category_is_an_error_that_names_it():
    with pytest.raises(KeyError, match="no category 'activation' in this ledger; it has parameters"):
        Ledger(parameters=1)["activation"]


def test_ledgers_add_and_subtract():
    peak, start = Ledger(parameters=10, activations=5), Ledger(parameters=10, inputs=2)
    assert peak - start == {"activations": 5, "inputs": -2}
    assert (peak - start).total == peak.total - start.total
    assert peak + start == {"parameters": 20, "activations": 5, "inputs": 2}


def test_categories_have_one_order_and_marked_ones_come_last():
    ledger = Ledger({"zebra": 1, "temporaries": 1, "communication": 1, "parameters": 1})
    assert list(ledger) == ["parameters", "communication", "temporaries", "zebra"]


def test_text_table_has_bytes_and_a_readable_size():
    lines = str(Ledger(parameters=2 * 2**30, activations=1536)).splitlines()
    assert lines[1].split() == ["parameters", "2,147,483,648", "2.0", "GiB"]
    assert lines[2].split() == ["activations", "1,536", "1.5", "KiB"]
    assert lines[-1].split()[:2] == ["total", "2,147,485,184"]


def test_two_ledgers_side_by_side_show_the_difference():
    table = beside(predicted=Ledger(parameters=10, inputs=3), measured={"parameters": 10, "activations": 1})
    assert table.rows() == [("parameters", (10, 10, 0)), ("inputs", (3, 0, -3)), ("activations", (0, 1, 1)),
                            ("total", (13, 11, -2))]
    assert "difference" in str(table).splitlines()[0]
    html = table._repr_html_()
    assert html.count("<tr>") == 5 and "<th style='text-align:right'>-2</th>" in html
    three = beside(a=Ledger(inputs=1), b=Ledger(inputs=2), c=Ledger(inputs=3))
    assert three.headers() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="at least one ledger"):
        beside()


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (112 * 2**30, "112.0 GiB"), (-2048, "-2.0 KiB"),
    (5 * 2**40, "5.0 TiB"), (2**55, "32,768.0 TiB"),
])
def test_human(nbytes, text):
    assert human(nbytes) == text
