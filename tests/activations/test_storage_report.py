"""The report: bytes before and after, why something was left, and what was saved for nothing."""

import torch
from torch import nn

from refimpl.activations import compress_activations
from refimpl.activations.storage_report import Report


def test_rows_add_up():
    report = Report()
    report.add("masks", 800, 100)
    report.add("masks", 80, 10)
    report.add("left: small", 5, 5)
    assert report.before == {"masks": 880, "left: small": 5} and report.before.total == 885
    assert report.after == {"masks": 110, "left: small": 5} and report.counts == {"masks": 2, "left: small": 1}
    assert str(report).splitlines()[-1].split() == ["total", "885", "115", "-770"]
    report.owned, report.host = 12345, 678
    assert "not touched: 12,345 bytes of parameters, buffers and inputs" in str(report)
    assert "in host memory: 678 bytes" in str(report) and Report().before.total == 0 and "total" in str(Report())


def test_what_somebody_else_holds_was_saved_for_nothing():
    x = torch.randn(64, 64, requires_grad=True)
    with compress_activations(nn.Linear(1, 1), smallest=0) as c:
        y = x * 1
        loss = y.sin().sum()
    assert c.report.held_elsewhere() == [(y.nbytes, "float32 [64, 64]")]
    assert "saved nothing: 16.0 KiB of originals that somebody still holds, such as float32 [64, 64]" in str(c.report)
    del y
    assert c.report.held_elsewhere() == [] and "saved nothing" not in str(c.report)
    loss.backward()


def test_in_a_notebook_it_is_a_table_and_the_same_words():
    report = Report()
    report.add("masks", 800, 100)
    report.owned = 5
    html = report._repr_html_()
    assert html.startswith("<table>") and "masks" in html and "<p>not touched: 5 bytes" in html
    assert html.count("<p>") == 1
