"""`--budget`: what fits is said, and what does not is tried, the cheapest first, until it does."""

import pytest
from explain_kit import PROGRAMS

from refimpl import cli
from refimpl.explain.budget import fitting

HELPS = {"none": 10, "recompute": 40, "bf16": 20, "accumulate": 60, "zero3": 70, "attention": 0}


def found(*answers):
    return {"peak": 100, "answers": [{"change": "del x", "saves": saves, "bound": bound} for saves, bound in answers],
            "helps": [{"name": name, "title": name.upper(), "saves": saves, "ranks": name == "zero3"}
                      for name, saves in HELPS.items()]}


def lines(budget, peaks, *answers):
    """Return the lines, and what was tried. `peaks`: {names: peak, None where the script fails}."""
    asked = []

    def tried(*names):
        asked.append("+".join(names))
        peak = peaks[asked[-1]]
        return {"status": 1} if peak is None else {"status": 0, "peak": peak}
    return list(fitting(found(*answers), budget, tried)), asked


def test_what_fits_is_not_tried():
    assert lines(100, {}) == (["the budget: 100 bytes fit into 100"], [])
    assert list(fitting({"status": 1}, 5, None)) == []


def test_the_cheapest_that_is_enough_is_tried_first():
    said, asked = lines(70, {"recompute": 65})
    assert asked == ["recompute"] and "tried, fits: recompute, 65 bytes" in said
    assert "may fit, at most 60 bytes less: ACCUMULATE" in said and "may fit, at most 70 bytes less: ZERO3" in said
    said, asked = lines(90, {"none": 90})
    assert asked == ["none"] and "tried, fits: none, 90 bytes" in said


def test_more_and_more_are_put_together_and_what_does_not_help_is_left_out():
    peaks = {"none": 95, "none+recompute": None, "none+bf16": 80}
    said, asked = lines(45, peaks)
    assert asked == list(peaks)
    assert said[1:3] == ["tried, too much: none, 95 bytes", "tried, too much: none + bf16, 80 bytes"]
    said, asked = lines(60, {"recompute": 61, "none": 90, "none+recompute": 60})
    assert asked == ["recompute", "none", "none+recompute"] and said[-3] == "tried, fits: none + recompute, 60 bytes"


@pytest.mark.parametrize(("saves", "bound", "is_said"), [(30, "", True), (29, "", False), (30, "loosely", False)])
def test_an_answer_that_is_exact_and_enough_is_said(saves, bound, is_said):
    said, _ = lines(70, {"recompute": 65}, (saves, bound))
    assert ("fits, as predicted: del x" in said) == is_said


def test_the_command_tries_a_script(capsys):
    script = str(PROGRAMS / "small_gpt.py")
    cli.main(["explain", "--budget", "1GiB", script])
    said = capsys.readouterr().out
    peak = int(said.rpartition("the budget: ")[2].split(" bytes fit into 1,073,741,824")[0].replace(",", ""))
    cli.main(["explain", "--budget", str(peak - 1), script])
    assert "tried, fits: " in capsys.readouterr().out
