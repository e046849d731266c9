"""Right functions pass, wrong and unfilled ones do not."""

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from blanks import NAME as page
from refimpl.papers.NAME import silu


def plain(x):
    return x * torch.sigmoid(x)


ANSWERS = {
    page.check_silu: Answers(
        right=[page.silu_from_x, F.silu, silu],
        wrong=[
            (F.gelu, "the output is another one"),
            (lambda x: plain(x)[:-1], "the output is another one"),
            (lambda x: plain(x.detach()), "no gradient can flow through it"),
            (lambda x: x * torch.sigmoid(x.detach()), "the gradient is another one"),
            (lambda x: 1.0, "expected a tensor, you return 1.0")],
        saves_nothing=(plain, "16,384 bytes are kept beside the output; x has 8,192"),
        same=("False → True",),  # `preserve_rng_state`: nothing here draws a number
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
