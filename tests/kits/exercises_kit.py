"""The tests of a page's exercises, or of its blanks, made from a table of right and wrong answers; parts of answers."""

import re
from typing import NamedTuple

import pytest
import rank_pool
import torch

from exercises import Exercise

RIGHT = re.compile(r": right, on [^\n]*\n$")
FEWEST = {"right": 3, "wrong": 5}


class Answers(NamedTuple):
    """The table of one exercise. `right`: answers, written differently; the first is the solution that readers see.
    `wrong`: pairs (answer, complaint), a part of what is said, or a pattern that is found in it. `saves_nothing`: such
    a pair whose answer is right but for its bytes; None where an answer holds none. `same`: changes of the solution, as
    `tools/mutants.py` names them, that leave it right."""

    right: list
    wrong: list
    saves_nothing: tuple | None = None
    same: tuple = ()


def graded(page, answers):
    """Return four tests of the exercises of a page, or of its blanks: right answers, wrong ones, those that are of use
    nowhere (nothing, a text, other arguments, an error, an exit), and tensors of another dtype."""
    exercises = exercises_of(page)
    assert list(answers) == exercises, f"{page.__name__}: expected a table for each exercise, in their order"
    for exercise, table in answers.items():
        for kind, least in FEWEST.items():
            found = len(getattr(table, kind))
            assert found >= least, f"{page.__name__}.{exercise.__name__}: {found} {kind} answers, at least {least}"
        assert len(page.HINTS[exercise.key]) >= 2, f"{page.__name__}.{exercise.__name__}: at least two hints"
        assert (table.saves_nothing is not None) == ("parity and bytes" in exercise.on), exercise.__name__

    def rows(kind):
        for exercise, table in answers.items():
            more = [table.saves_nothing] if kind == "wrong" and table.saves_nothing else []
            for number, row in enumerate([*getattr(table, kind), *more]):
                marks = [pytest.mark.core] if not number else []
                values = (exercise, *row) if kind == "wrong" else (exercise, row)
                yield pytest.param(*values, marks=marks, id=f"{exercise.__name__}-{number}")

    @pytest.mark.parametrize(("exercise", "answer"), list(rows("right")))
    def right_answers(said, exercise, answer):
        found = said(exercise, answer)
        assert RIGHT.search(found), found

    @pytest.mark.parametrize(("exercise", "answer", "complaint"), list(rows("wrong")))
    def wrong_answers(said, exercise, answer, complaint):
        found = said(exercise, answer)
        seen = complaint.search(found) if isinstance(complaint, re.Pattern) else complaint in found
        assert seen and not RIGHT.search(found), found

    @pytest.mark.parametrize("answer", ANYWHERE, ids=lambda answer: answer.__name__)
    @pytest.mark.parametrize("exercise", exercises, ids=lambda exercise: exercise.__name__)
    def answers_of_no_use(said, exercise, answer):
        found = said(exercise, answer)
        assert answer.__doc__ in found and not RIGHT.search(found), found

    @pytest.mark.parametrize("exercise", [each for each in exercises if gives_tensors(each.gives)] or [None],
                             ids=lambda exercise: getattr(exercise, "__name__", "none"))
    def another_dtype(said, exercise):
        if exercise is None:
            return  # the answers of this page are no tensors
        found = said(exercise, in_fp64(answers[exercise].right[0]))
        assert not RIGHT.search(found), found

    return right_answers, wrong_answers, answers_of_no_use, another_dtype


def exercises_of(page):
    """List what a module grades, in its order."""
    return [each for each in vars(page).values() if isinstance(each, Exercise)]


@pytest.fixture
def graded_here(request, monkeypatch):
    """Answers are graded in this process, on ranks that live on; what ends ranks, as an error does, starts others."""
    monkeypatch.setattr(Exercise, "apart", False)
    if hasattr(request.module, "page") and hasattr(request.module.page, "launch"):
        monkeypatch.setattr(request.module.page, "launch", rank_pool.pooled)


@pytest.fixture
def said(capsys, graded_here):
    """A function: what an exercise prints about an answer."""
    def grade(exercise, answer):
        exercise(answer)
        return capsys.readouterr().out

    return grade


# --- answers that no exercise takes; the docstring is a part of what is said ------------------------------------------


def nothing(*args):
    """not answered yet"""


def ellipsis(*args):
    """not answered yet"""
    return ...


def text(*args):
    """expected """
    return "as many as there are"


def other_arguments(*, of_mine):
    """and does not take them"""
    return of_mine


def raising(*args):
    """your function raises ZeroDivisionError"""
    return 1 / 0


def leaving(*args):
    """your function ends Python"""
    raise SystemExit


ANYWHERE = nothing, ellipsis, text, other_arguments, raising, leaving


def gives_tensors(gives):
    """Tell whether an exercise's answer returns tensors."""
    return any(map(gives_tensors, gives)) if isinstance(gives, (tuple, list)) else gives is torch.Tensor


def in_fp64(answer):
    """Return an answer whose tensors are in 64 bits, the numbers of a GPU's user who has set the wrong default."""
    def converted(value):
        if isinstance(value, torch.Tensor):
            return value.double() if value.is_floating_point() else value.float()
        return type(value)(map(converted, value)) if isinstance(value, (tuple, list)) else value

    return lambda *args: converted(answer(*args))


# --- parts of answers ------------------------------------------------------------------------------------------------


def averaged(comm, gradient):
    """Return this rank's shard of the mean over ranks."""
    return comm.reduce_scatter(gradient, "avg")


def all_reduced(comm, gradient):
    """The same numbers, of twice the bytes."""
    return comm.all_reduce(gradient, "avg").chunk(comm.world_size)[comm.rank].clone()
