"""The loss and gradient of some rows, against autograd in fp64; bad options; ranks with other targets."""

import itertools
import math

import pytest
import torch
from head_kit import exact, head
from rank_pool import pooled

from refimpl.comm import CollectiveMismatch, FakeCommunicator
from refimpl.cross_entropy.rows import Terms, VocabularyColumns, row_losses


@pytest.mark.parametrize(("smoothing", "z_loss", "softcap"), [*itertools.product([0, 0.1, 1], [0, 0.01], [None, 3.0])])
def test_loss_and_gradient_are_autograds(smoothing, z_loss, softcap):
    z_RV, _, targets, _ = head(11, 50, 50, torch.float64, needs=False)
    z_RV, options = z_RV * 4, {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
    expected = exact(z_RV, torch.eye(50, dtype=torch.float64), targets, reduction="sum", **options)
    loss_R = row_losses(z_RV, targets, Terms(-100, **options), VocabularyColumns(0, 50, 50), z_RV.new_ones(()), True)
    assert (loss_R.sum() - expected[0]).abs() < 1e-12 * expected[0].abs() and (z_RV - expected[1]).abs().max() < 1e-13
    assert (loss_R[targets == -100] == 0).all() and (z_RV[targets == -100] == 0).all()


def test_large_logits_do_not_overflow():
    z_RV = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]])
    loss_R = row_losses(z_RV, torch.tensor([0, 0]), Terms(), VocabularyColumns(0, 3, 3), torch.ones(()), True)
    assert loss_R.tolist() == [0, 2e4] and z_RV.tolist() == [[0, 0, 0], [-1, 0, 1]]


def test_an_ignored_row_of_nan_counts_for_nothing():
    z_RV = torch.full((2, 3), float("nan"))
    loss_R = row_losses(z_RV, torch.tensor([-100, 1]), Terms(), VocabularyColumns(0, 3, 3), torch.ones(()), False)
    assert loss_R[0] == 0 and loss_R[1].isnan()


@pytest.mark.parametrize(("options", "words"), [
    ({"label_smoothing": -0.1}, "from 0 to 1"), ({"label_smoothing": 1.1}, "from 0 to 1"),
    ({"z_loss": -1.0}, "at least 0"), ({"z_loss": math.nan}, "at least 0"), ({"z_loss": math.inf}, "finite"),
    ({"softcap": math.inf}, "finite"), ({"softcap": 0.0}, "above 0"), ({"softcap": -30.0}, "above 0")])
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        Terms(**options).check()


def test_columns_of_a_rank():
    assert VocabularyColumns.of(None, 7, None) == VocabularyColumns.of(None, 7, 7) == (0, 7, 7, None)
    with pytest.raises(ValueError, match="vocabulary=14 without comm, and weight has 7 rows: expected the Comm"):
        VocabularyColumns.of(None, 7, 14)
    comm = FakeCommunicator(1, 3)
    assert VocabularyColumns.of(comm, 34, 101)[:3] == (33, 34, 101)
    with pytest.raises(ValueError, match="33 rows on rank 1 of 3: expected 34, rows 33 … 66 of 101"):
        VocabularyColumns.of(comm, 33, 101)
    for V in (None, 2):
        with pytest.raises(ValueError, match="whole vocabulary"):
            VocabularyColumns.of(comm, 1, V)


def other_targets(comm):
    targets = torch.tensor([1, 2, -100 if comm.rank == 1 else 5])
    try:
        row_losses(torch.zeros(3, 4), targets, Terms(), VocabularyColumns.of(comm, 4, 8), torch.ones(()), True)
    except CollectiveMismatch as error:
        return str(error)
    return ""


@pytest.mark.faults
def test_ranks_with_other_targets_are_named():
    words = "other targets than the rest of its group: 1 rows of 3 differ, the first is row 2"
    assert any(words in said for said in pooled(other_targets, 2))
