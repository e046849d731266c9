"""What the tests of every page's exercises share."""

import pytest


@pytest.fixture
def said(capsys):
    """A function: what an exercise prints about an answer."""

    def grade(exercise, answer):
        exercise(answer)
        return capsys.readouterr().out

    return grade
