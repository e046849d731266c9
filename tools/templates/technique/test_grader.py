"""Right answers pass, wrong and unanswered ones do not."""

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from exercises import NAME as page
from refimpl.papers.NAME import silu


def plain(x):
    return x * torch.sigmoid(x)


def recomputed(x):
    return checkpoint(plain, x, use_reentrant=False, preserve_rng_state=False)


ANSWERS = {
    page.first: Answers(
        right=[recomputed, F.silu, silu],
        wrong=[
            (F.gelu, "the output is another one"),
            (lambda x: plain(x)[:-1], "the output is another one"),
            (lambda x: plain(x.detach()), "no gradient can flow through it"),
            (lambda x: x * torch.sigmoid(x.detach()), "the gradient is another one"),
            (lambda x: 1.0, "expected a tensor, you return 1.0")],
        saves_nothing=(plain, "16,384 bytes are kept beside the output; x has 8,192"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
