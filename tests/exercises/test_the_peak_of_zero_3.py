"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import the_peak_of_zero_3 as page


def predict(layers, nbytes, world_size, ahead):
    gathered = 2 * layers - 1  # the last one stays for backward
    most = layers * nbytes // world_size + min(layers, 1 + ahead) * nbytes
    return most, (gathered + layers) * (world_size - 1) * nbytes // world_size


def highest(units, world_size, *, shards_of_gradients=True):
    before = [0, *units]
    return max(sum(units) // world_size + 2 * unit + before[k]
               + (sum(units[k + 1:]) // world_size if shards_of_gradients else 0) for k, unit in enumerate(units))


def of_the_largest(units, world_size):
    """As if the largest unit decided, whatever is whole beside it."""
    return sum(units) // world_size + 3 * max(units)


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (lambda layers, nbytes, n, ahead: layers * nbytes, "expected a pair"),
            (lambda layers, nbytes, n, ahead: (layers * nbytes // n, 0), "a rank has 32,772 bytes of parameters"),
            (lambda layers, nbytes, n, ahead: (predict(layers, nbytes, n, ahead)[0], 3 * layers * nbytes), "the bytes held are right; you say 196,608 are sent, a rank sends 135,168")],
    ),
    page.second: Answers(
        right=[highest],
        wrong=[
            (of_the_largest, "bytes of parameters and gradients"),
            (partial(highest, shards_of_gradients=False), "bytes of parameters and gradients"),
            (lambda units, n: sum(units), "4 ranks: you say")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
