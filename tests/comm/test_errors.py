"""What a caller of `launch` catches: who began it, who is to blame, and that it can be pickled."""

import pickle

import pytest

from refimpl.comm import CollectiveMismatch, RankError


@pytest.mark.parametrize("kind", [RankError, CollectiveMismatch])
def test_the_first_rank_began_it_and_an_error_is_pickled_whole(kind):
    error = pickle.loads(pickle.dumps(kind("rank 3 raised", iter([3, 1]))))
    assert (type(error), str(error), error.ranks, error.rank) == (kind, "rank 3 raised", (3, 1), 3)


def test_a_mismatch_is_caught_as_a_rank_error_and_that_as_a_runtime_error():
    assert issubclass(CollectiveMismatch, RankError) and issubclass(RankError, RuntimeError)


def test_nobody_to_blame():
    assert RankError("who knows").rank is None and RankError("who knows").ranks == ()
