"""What the tests of every page's exercises share."""

import pytest
import rank_pool


@pytest.fixture(autouse=True)
def ranks_that_live_on(request, monkeypatch):
    """Right and wrong answers are graded on ranks that live on; a blank one, and an error, end their ranks."""
    if "answer" in request.fixturenames and hasattr(request.module.page, "launch"):
        monkeypatch.setattr(request.module.page, "launch", rank_pool.pooled)


@pytest.fixture
def said(capsys):
    """A function: what an exercise prints about an answer."""
    def grade(exercise, answer):
        exercise(answer)
        return capsys.readouterr().out

    return grade
