"""Right answers pass, wrong and unanswered ones do not."""

import math
import re
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import attention_of_today as page
from refimpl.attention import ScoreHook, reference_attention
from refimpl.attention.kv_cache import absorbed, expand


class Strided(ScoreHook):
    masks, slope = True, True

    def __init__(self, stride):
        self.stride = stride

    def forward(self, scores, b, h, q_idx, k_idx):
        away = q_idx - k_idx
        return (scores * (h + 1)).masked_fill((away < 0) | (away % self.stride != 0), -math.inf)

    def derivative(self, scores, b, h, q_idx, k_idx):
        return h + 1.0 if self.slope else 1.0


class WithoutDerivative(Strided):
    slope = False


class Whole(Strided):
    def forward(self, scores, b, h, q_idx, k_idx):
        if not hasattr(self, "away"):
            self.away = torch.arange(256)[:, None] - torch.arange(256)
            self.hidden = (self.away < 0) | (self.away % self.stride != 0)
        return (scores * (h + 1)).masked_fill(self.hidden[q_idx, k_idx], -math.inf)


def attend(q, k, v, sinks, tile, start=True):
    m = sinks.view(-1, 1, 1).expand(*q.shape[:3], 1).clone() if start else q.new_full((*q.shape[:3], 1), -math.inf)
    total, out = torch.full_like(m, float(start)), torch.zeros_like(q)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        scores = q @ k_tile.mT * q.shape[-1] ** -0.5
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p, shrink = (scores - m_new).exp_(), (m - m_new).exp_()
        total, out, m = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total


def at_the_end(q, k, v, sinks, tile):
    """Overflows where the sink is far below or above the scores."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.exp() @ v / (s.exp().sum(-1, keepdim=True) + sinks.view(-1, 1, 1).exp())


def whole(q, k, v, sinks, tile):
    return reference_attention(q, k, v, sinks=sinks)


def expanded(q, *cache):
    return reference_attention(q, *expand(*cache))


on_the_latent = partial(absorbed, reference_attention)
ANSWERS = {
    page.first: Answers(
        right=[Strided],
        wrong=[
            (WithoutDerivative, re.compile("dq is not .*is `derivative` there")),
            (lambda stride: ScoreHook(), "output is not"),
            (Whole, "right, but it took")],
    ),
    page.second: Answers(
        right=[attend],
        wrong=[
            (partial(attend, start=False), "not the softmax"),
            (at_the_end, re.compile("not the softmax|right, but")),
            (whole, re.compile("right, but .* for 200|for 1,024"))],
    ),
    page.third: Answers(
        right=[on_the_latent],
        wrong=[
            (expanded, "right, but it took"),
            (partial(on_the_latent, scale=40**-0.5), "the scale is 1/")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_a_mask_that_is_kept_is_seen_as_broken():
    hook = page.MaskKeptWhole(torch.arange(8)[None] // 3)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    torch.testing.assert_close(reference_attention(q, k, v, score=hook), reference_attention(
        q, k, v, cu_seqlens=[0, 3, 6, 8]))
    assert hook.mask_B1TS.numel() == 64
