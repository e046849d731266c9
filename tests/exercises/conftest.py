"""What the tests of every page's exercises share."""

import pytest
import rank_pool

from exercises import Exercise


@pytest.fixture(autouse=True)
def graded_here(request, monkeypatch):
    """Answers are graded in this process, on ranks that live on; what ends ranks, as an error does, starts others."""
    monkeypatch.setattr(Exercise, "apart", False)
    if hasattr(request.module, "page") and hasattr(request.module.page, "launch"):
        monkeypatch.setattr(request.module.page, "launch", rank_pool.pooled)


@pytest.fixture
def said(capsys):
    """A function: what an exercise prints about an answer."""
    def grade(exercise, answer):
        exercise(answer)
        return capsys.readouterr().out

    return grade
