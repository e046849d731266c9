"""Right answers pass, wrong and unanswered ones do not."""

import torch
from exercises_kit import graded
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from exercises import NAME as page
from refimpl.papers.NAME import silu


def plain(x):
    return x * torch.sigmoid(x)


def recomputed(x):
    return checkpoint(plain, x, use_reentrant=False, preserve_rng_state=False)


RIGHT = [(page.first, silu), (page.first, F.silu), (page.first, recomputed)]
WRONG = [
    (page.first, plain, "16,384 bytes are kept beside the output; x has 8,192"),
    (page.first, F.gelu, "the output is another one"),
    (page.first, lambda x: plain(x)[:-1], "the output is another one"),
    (page.first, lambda x: plain(x.detach()), "no gradient can flow through it"),
    (page.first, lambda x: x * torch.sigmoid(x.detach()), "the gradient is another one"),
    (page.first, lambda x: 1.0, "expected a tensor, yours is float")]
test_right_answers, test_wrong_answers, test_blank_answers = graded(page, RIGHT, WRONG, (None, ...))
