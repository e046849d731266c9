"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.exercises import the_peak_of_zero_3 as page


def predict(layers, nbytes, world_size, ahead):
    gathered = 2 * layers - 1  # the last one stays for backward
    most = layers * nbytes // world_size + min(layers, 1 + ahead) * nbytes
    return most, (gathered + layers) * (world_size - 1) * nbytes // world_size


def highest(units, largest, world_size):
    before = [0, *units]
    return max(sum(units) // world_size + 2 * unit + before[k] + largest[k] + sum(units[k + 1:]) // world_size
               for k, unit in enumerate(units))


def of_the_largest(units, largest, world_size):
    """As if the largest unit decided, whatever is whole beside it."""
    return sum(units) // world_size + 3 * max(units) + max(largest)


def without_shards_of_gradients(units, largest, world_size):
    before = [0, *units]
    return max(sum(units) // world_size + 2 * unit + before[k] + largest[k] for k, unit in enumerate(units))


@pytest.mark.parametrize(("exercise", "answer"), [(page.first, predict), (page.second, highest)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, lambda layers, nbytes, n, ahead: layers * nbytes, "expected a pair"),
    (page.first, lambda layers, nbytes, n, ahead: (layers * nbytes // n, 0), "a rank has 32,772 bytes of parameters"),
    (page.first, lambda layers, nbytes, n, ahead: (predict(layers, nbytes, n, ahead)[0], 3 * layers * nbytes),
     "the bytes held are right; you say 196,608 are sent, a rank sends 135,168"),
    (page.second, of_the_largest, "bytes of parameters and gradients"),
    (page.second, without_shards_of_gradients, "bytes of parameters and gradients"),
    (page.second, lambda units, largest, n: sum(units), "4 ranks: you say"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
