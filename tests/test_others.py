"""What techniques ask of models that others wrote: who answers, in which order, and when it is loaded."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from refimpl import known_models, others
from refimpl.others import ask, ask_of_others, register


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(others, "_answers", {question: [*found] for question, found in others._answers.items()})


class Flipped(nn.Module):
    """A layer of a library that nobody here knows."""


def test_who_was_registered_last_is_asked_first_and_the_others_of_what_it_does_not_know():
    assert ask("transposed", Flipped()) is None and ask("transposed", Conv1D(4, 2))
    register({"transposed": lambda layer: "mine" if isinstance(layer, Flipped) else None})
    assert ask("transposed", Flipped()) == "mine" and ask("transposed", Conv1D(4, 2)) is True


def test_what_is_torch_s_or_ours_is_not_asked_about():
    register({"transposed": lambda layer: "asked"})
    found = [ask_of_others("transposed", each) for each in (nn.Linear(2, 2), torch.ones(2), (1, 2), None, Flipped())]
    assert found == [None, None, None, None, "asked"]


def test_each_question_is_listed_and_has_an_answer():
    answered = {question for named in known_models.ANSWERS.values() for question in named}
    assert {*re.findall(r'ask\("(\w+)"', others.__doc__)} == answered == {*others._answers}


def test_answers_are_loaded_by_the_first_question_and_the_other_kinds_are_not():
    code = """
import sys, refimpl.checkpointing as c
from refimpl.others import register
register({"cache": lambda value: "mine" if value == {3} else None})  # before any question: asked first, all the same
from refimpl.others import ask
print(ask("cache", {3}), ask("cache", {4}), *sorted(n for n in sys.modules if n.startswith("refimpl.known_models.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mine", "None", "refimpl.known_models.attention_layers"]


def test_who_registers_before_any_question_is_asked_before_what_is_known():
    code = """
import torch
from refimpl.others import ask, register
mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
register({"mlp": lambda module: "mine"})
print(ask("mlp", mlp))
from refimpl.known_models.mlp import read
assert read(mlp)  # which is known, too
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine\n"
