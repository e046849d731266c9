"""Models that differ are named before they are cut: modules, code, config, values."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from refimpl.comm import CollectiveMismatch
from refimpl.comm.same_model import check_same_model, code_of, text_of, values_of


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def model(seed=0, *more):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), *more)


@on_ranks(2)
def test_the_first_that_differs_is_named(comm):
    check_same_model(comm, model(0, Twice()), seed=1)
    for mine, also, words in (
            (model(comm.rank), 0, r"another parameters than rank 0: .* another value of 0.weight than rank 0"),
            (model(0, nn.Tanh() if comm.rank else nn.ReLU()), 0,
             r"another modules .* another line 3 of its text .* rank 0: \(1\): ReLU\(\); rank 1: \(1\): Tanh\(\)"),
            (model().half() if comm.rank else model(), 0, "another parameters .* float32 .* float16"),
            (model(), comm.rank, "another seed than rank 0: rank 0: 0; rank 1: 1")):
        with pytest.raises(CollectiveMismatch, match=f"(?s)ranks \\[1\\] have {words}") as error:
            check_same_model(comm, mine, seed=also)
        assert error.value.ranks == (1,)


def test_another_forward_is_another_code(monkeypatch):
    before = code_of(model(0, Twice()))
    assert before == code_of(model(1, Twice()))
    monkeypatch.setattr(Twice, "forward", lambda self, x: 3 * x)
    assert code_of(model(0, Twice())) != before


def test_what_is_of_a_process_stays_out():
    class Placed(nn.Module):
        def extra_repr(self):
            return f"3, {object()!r}, rank 6 (1 of 2 in its group), Communicator(rank 6 of 2 (world ranks 4, 6), cpu)"

    assert text_of(nn.Sequential(Placed())) == text_of(nn.Sequential(Placed()))
    assert "rank" not in text_of(Placed())


def test_values_without_bytes():
    with torch.device("meta"):
        assert values_of(nn.Linear(2, 3)) == {"weight": "(3, 2) float32 []", "bias": "(3,) float32 []"}
