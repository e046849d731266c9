"""What graders do with an answer that would break the reader's kernel: each is stopped with a sentence."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

import exercises
from exercises import Exercise, close, exercise, readable
from exercises.asking import SCALAR, fault
from refimpl import comm
from refimpl.ranks import RankError

HINTS = {"four": ["It is even.", "2 + 2."]}


@exercise("parity", int)
def four(answer):
    return None if answer(2, 2) == 4 else "2 and 2 are 4"


def endless(*args):
    while True:
        pass


def killed(*args):
    ctypes.string_at(0)


def gone(*args):
    os._exit(0)


def loud(*args):
    for _ in range(1000):
        print("x" * 1000)
    return 4


def leaving(*args):
    sys.exit(3)


def patched(*args):
    torch.Tensor.backward = None
    return 4


def other_dtype(*args):
    torch.set_default_dtype(torch.float64)
    return 4


def without_graphs(*args):
    torch.set_grad_enabled(False)
    return 4


def told(*args):
    print("on the way")
    return 4


def deep(*args):
    return deep(*args)


ENDED = [
    (killed, "your function was ended: it was killed by SIGSEGV"),
    (gone, "your function was ended: it exited with code 0 before it returned"),
    (endless, "your function was ended: it did not return within 2 s, the limit"),
    (loud, "your function prints more than 20,000 characters: print less"),
    (leaving, "your function ends Python (exit, or sys.exit): let it return instead"),
    (patched, "your function changes Tensor.backward for all that comes after it: leave torch as it is"),
    (other_dtype, "your function changes torch's default dtype for all that comes after it"),
    (without_graphs, "your function changes whether torch makes graphs for all that comes after it"),
    (deep, "your function raises RecursionError")]


@pytest.mark.parametrize(("answer", "words"), ENDED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_breaks_a_kernel_is_stopped_with_a_sentence(monkeypatch, capsys, answer, words):
    monkeypatch.setattr(exercises, "SECONDS", 2)
    backward, dtype = torch.Tensor.backward, torch.get_default_dtype()
    four(answer)
    found = capsys.readouterr().out
    assert f"four exercise: {words}" in found and len(found) < 30_000
    assert (torch.Tensor.backward, torch.get_default_dtype(), torch.is_grad_enabled()) == (backward, dtype, True)


@pytest.mark.parametrize(("answer", "words"), [row for row in ENDED if row[0] not in (killed, gone, endless)],
                         ids=lambda each: getattr(each, "__name__", ""))
def test_so_is_what_breaks_the_process_of_the_tests(monkeypatch, capsys, answer, words):
    monkeypatch.setattr(Exercise, "apart", False)
    backward, dtype = torch.Tensor.backward, torch.get_default_dtype()
    four(answer)
    assert f"four exercise: {words}" in capsys.readouterr().out
    assert (torch.Tensor.backward, torch.get_default_dtype(), torch.is_grad_enabled()) == (backward, dtype, True)


def test_of_several_ranks_the_one_that_ended_is_named(monkeypatch, capsys):
    def fail(answer):
        raise RankError("rank 2 returned after 0 collectives; ranks 0 and 1 wait for it in all_reduce")

    monkeypatch.setattr(four, "process", "ranks")
    monkeypatch.setattr(four, "check", fail)
    four(max)
    assert capsys.readouterr().out.startswith("four exercise: your function was ended: rank 2 returned after 0")


def test_where_ranks_waited_is_shown_by_the_readers_own_lines(monkeypatch, capsys):
    theirs, own = Path(exercises.__file__), '  File "mine.py", line 3, in answer\n    comm.all_reduce(x)\n'
    frames = "".join(f'  File "{each}", line 1, in f\n    f(\n      ^\n' for each in (
        theirs, theirs.parents[1] / "blanks" / "zero_3.py", comm.__file__, torch.__file__))

    def fail(answer):
        raise RankError(f"ranks 0 and 1 did not return\n\nwhere rank 0 was:\n{frames}{own}{frames}")

    monkeypatch.setattr(four, "process", "ranks")
    monkeypatch.setattr(four, "check", fail)
    four(max)
    assert capsys.readouterr().out.endswith(f"did not return\n\nwhere rank 0 was:\n{own}\n")


def test_what_an_answer_prints_is_shown(capsys):
    four(told)
    assert capsys.readouterr().out == "on the way\nfour exercise: right, on parity\n"


def test_of_an_error_the_readers_own_lines_are_shown_without_those_of_torch_and_of_graders(capsys):
    four(lambda *args: torch.nn.functional.linear(torch.nn.Linear(2, 2)(torch.ones(3))))
    printed = capsys.readouterr().out
    assert "your function raises RuntimeError" in printed and printed.count("File ") == 1
    assert f'File "{__file__}"' in printed


def test_an_answer_that_is_not_filled_in_needs_no_process(monkeypatch, capsys):
    monkeypatch.setattr(exercises, "run", None)
    four(lambda *args: ...)
    assert "not answered yet" in capsys.readouterr().out


def test_hints_come_one_by_one(capsys):
    for _ in range(3):
        four.hint()
    assert capsys.readouterr().out.splitlines() == [
        "hint 1 of 2: It is even.", "hint 2 of 2: 2 + 2.", "hint 1 of 2: It is even."]


def test_a_solution_is_the_first_right_answer_with_what_it_calls(capsys):
    from exercises import zero_1_and_2 as page

    page.second.solution()
    shown = {}
    exec("import torch\n" + capsys.readouterr().out, shown)
    assert page.second.complaint(shown["sharded"]) is None


@pytest.mark.parametrize(("value", "gives", "words"), [
    (3.0, int, None), (True, int, "expected a number, you return True (bool)"),
    ("3", float, "expected a number, you return '3' (str)"), (torch.ones(1), SCALAR, None),
    (torch.ones(2), SCALAR, "expected a number, or a tensor of one, you return a tensor of shape (2,) (Tensor)"),
    ((1, 2), (int, int), None), ([1, 2], (int, int), None),
    ((1,), (int, int), "expected 2 values (a number, a number)"), ([], [int], None),
    ((1, "2"), (int, int), "expected a number, you return '2' (str)"),
    (torch.ones(2), [torch.Tensor], "expected a list or tuple, each of it a tensor"), (print, callable, None),
    ([(0,)], [int], "in your list: expected a number, you return (0,) (tuple)"),
    (3, ([int], callable), "expected 2 values (a list or tuple, each of it a number; a function), you return 3"),
    (3, callable, "expected a function, you return 3 (int)")])
def test_what_an_answer_returns_is_looked_at_first(value, gives, words):
    found = fault(value, gives)
    assert found is None if words is None else found.startswith(words)


def test_a_storage_is_asked_for_its_size_before_it_is_read():
    x = torch.ones(8)
    seven, ends = x[:7], x[::7]
    assert readable(x) and close(x, torch.ones(8)) and readable(torch.empty(0))
    x.untyped_storage().resize_(28)
    assert readable(seven) and not readable(x) and not readable(ends) and not close(x, torch.ones(8))


@pytest.mark.parametrize(("said", "same"), [
    (torch.ones(4), True), (torch.ones(4) + 1e-6, True), (torch.ones(4) + 1e-3, False), (torch.ones(2, 2), False),
    (torch.ones(4).double(), False), (torch.full((4,), torch.nan), False)])
def test_what_is_close(said, same):
    assert close(said, torch.ones(4)) is same
