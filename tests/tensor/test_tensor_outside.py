"""Tensor parallelism of models that others wrote, by their own plans and by ours: equal to the unsplit model."""

import pytest
from rank_pool import pooled
from tensor_outside_kit import MODELS, distance


@pytest.mark.parametrize("name", MODELS)
def test_a_score_and_its_gradients_are_those_of_the_unsplit_model(name):
    assert max(pooled(distance, 2, name)) <= 1e-12
