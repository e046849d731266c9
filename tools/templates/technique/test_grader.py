"""Right answers pass, wrong and unanswered ones do not."""

import math

import torch
from exercises_kit import Answers, graded

from exercises import NAME as page
from refimpl.NAME import saved_bytes


def predict(shape, dtype):
    return math.prod(shape) * dtype.itemsize


ANSWERS = {
    page.first: Answers(
        right=[predict, saved_bytes, lambda shape, dtype: torch.empty(shape, dtype=dtype).nbytes],
        wrong=[
            (lambda shape, dtype: 2 * predict(shape, dtype), "you say 16,384, 8,192 bytes are kept"),
            (lambda shape, dtype: math.prod(shape), "you say 2,048, 8,192 bytes are kept"),
            (lambda shape, dtype: 4 * math.prod(shape), "in torch.bfloat16: you say 8,192, 4,096"),
            (lambda shape, dtype: shape[0] * shape[1] * dtype.itemsize, "(3, 5, 7) in torch.float32: you say 60, 420"),
            (lambda shape, dtype: sum(shape) * dtype.itemsize, "you say 384, 8,192 bytes are kept")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
