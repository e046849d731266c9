"""The three tests of a page's exercises, made from tables of right and wrong answers; parts of answers."""

import re

import pytest

RIGHT = "exercise: right, on parity and on bytes\n"


def graded(page, right, wrong, blanks=(None,)):
    """Return three tests, of right, of wrong and of blank answers to each exercise of a page.

    `right` has pairs (exercise, answer), `wrong` triples (exercise, answer, complaint): a part of what is said, or a
    pattern that is found in it. A blank answer returns one of `blanks`.
    """
    exercises = [getattr(page, name) for name in ("first", "second", "third") if hasattr(page, name)]
    for table in (right, wrong):
        assert {row[0] for row in table} == set(exercises), f"{page.__name__}: an exercise has no row in a table"

    @pytest.mark.parametrize(("exercise", "answer"), right)
    def right_answers(said, exercise, answer):
        found = said(exercise, answer)
        assert found.endswith(RIGHT), found

    @pytest.mark.parametrize(("exercise", "answer", "complaint"), wrong)
    def wrong_answers(said, exercise, answer, complaint):
        found = said(exercise, answer)
        seen = complaint.search(found) if isinstance(complaint, re.Pattern) else complaint in found
        assert seen and not found.endswith(RIGHT), found

    @pytest.mark.parametrize("exercise", exercises)
    @pytest.mark.parametrize("blank", blanks)
    def blank_answers(said, exercise, blank):
        found = said(exercise, lambda *args: blank)
        assert "not answered yet" in found, found

    return right_answers, wrong_answers, blank_answers


def averaged(comm, gradient):
    """Return this rank's shard of the mean over ranks."""
    return comm.reduce_scatter(gradient, "avg")


def all_reduced(comm, gradient):
    """The same numbers, of twice the bytes."""
    return comm.all_reduce(gradient, "avg").chunk(comm.world_size)[comm.rank].clone()
