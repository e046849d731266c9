"""Right answers pass, wrong and unanswered ones do not."""

import math
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import attention_of_today as page
from refimpl.attention import ScoreHook, reference_attention, tiled_attention
from refimpl.attention.kv_cache import absorbed, expand

# --- first -----------------------------------------------------------------------------------------------------------


class Strided(ScoreHook):
    masks = True

    def __init__(self, stride):
        self.stride = stride

    def forward(self, scores, b, h, q_idx, k_idx):
        away = q_idx - k_idx
        hidden = (away < 0) | (away % self.stride != 0)
        return (scores * (h + 1)).masked_fill(hidden, -math.inf)

    def derivative(self, scores, b, h, q_idx, k_idx):
        return h + 1


class StridedByWhere(ScoreHook):
    masks = True

    def __init__(self, stride):
        self.stride = stride

    def forward(self, scores, b, h, q_idx, k_idx):
        seen = (k_idx <= q_idx) & (k_idx.remainder(self.stride) == q_idx.remainder(self.stride))
        return torch.where(seen, torch.addcmul(scores, scores, h.to(scores.dtype)), -math.inf)

    def derivative(self, scores, b, h, q_idx, k_idx):
        return torch.ones_like(scores) + h


class StridedByAddition(ScoreHook):
    masks = True

    def __init__(self, stride):
        self.stride = stride

    def forward(self, scores, b, h, q_idx, k_idx):
        away = (q_idx - k_idx).float()
        bias = torch.zeros_like(away)
        bias[(away < 0) | (torch.fmod(away, self.stride) > 0)] = -math.inf
        return scores * (h + 1.0) + bias

    def derivative(self, scores, b, h, q_idx, k_idx):
        return h.double() + 1 if scores.dtype == torch.float64 else h.float() + 1


class OtherHook(Strided):
    """Parts of `Strided` that may have a fault."""

    def __init__(self, stride, *, masks=True, slope=lambda scores, h: h + 1, factor=lambda h: h + 1,
                 hidden=lambda away, stride, q_idx, k_idx: (away < 0) | (away % stride != 0), value=-math.inf):
        self.stride, self.masks, self.slope, self.factor, self.hidden = stride, masks, slope, factor, hidden
        self.value = value

    def forward(self, scores, b, h, q_idx, k_idx):
        hidden = self.hidden(q_idx - k_idx, self.stride, q_idx, k_idx)
        return (scores * self.factor(h)).masked_fill(hidden, self.value)

    def derivative(self, scores, b, h, q_idx, k_idx):
        return self.slope(scores, h)


class Whole(Strided):
    """Right, with the mask of all queries and keys made once."""

    def forward(self, scores, b, h, q_idx, k_idx):
        if not hasattr(self, "hidden"):
            away = torch.arange(1024)[:, None] - torch.arange(1024)
            self.hidden = (away < 0) | (away % self.stride != 0)
        return (scores * (h + 1)).masked_fill(self.hidden[q_idx, k_idx], -math.inf)


class KeptTiles(Strided):
    """Right, with every tile's mask kept."""

    def forward(self, scores, b, h, q_idx, k_idx):
        away = q_idx - k_idx
        self.kept = [*getattr(self, "kept", []), away]
        return (scores * (h + 1)).masked_fill((away < 0) | (away % self.stride != 0), -math.inf)


class Failing(Strided):
    def forward(self, scores, b, h, q_idx, k_idx):
        return scores.masked_fill(torch.ones(7, 5, dtype=torch.bool), -math.inf)


# --- second ----------------------------------------------------------------------------------------------------------


def attend(q, k, v, sinks, tile):
    m = sinks.view(-1, 1, 1).expand(*q.shape[:3], 1)
    total, out = torch.ones_like(m), torch.zeros_like(q)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        scores = q @ k_tile.mT * q.shape[-1] ** -0.5
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = (scores - m_new).exp(), (m - m_new).exp()
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total


def attend_in_two_passes(q, k, v, sinks, tile):
    """Makes the scores twice: first for the logsumexp, then for the output."""
    q = q / math.sqrt(q.shape[-1])
    lse = sinks[:, None].expand(q.shape[:3])
    for k_tile in k.split(tile, dim=2):
        lse = torch.logaddexp(lse, (q @ k_tile.mT).logsumexp(dim=-1))
    return sum((q @ k_tile.mT - lse[..., None]).exp() @ v_tile
               for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True))


def attend_with_the_sink_last(q, k, v, sinks, tile):
    out, lse = tiled_attention(q, k, v, key_tile=tile, query_tile=tile, return_logsumexp=True)
    return out * torch.sigmoid(lse - sinks[:, None])[..., None]


def attend_after_the_maximum(q, k, v, sinks, tile):
    """Takes the keys' maximum first: a sink far above it makes the sum infinite, and all weights 0, as they are."""
    m = torch.cat([(q @ part.mT * q.shape[-1] ** -0.5).amax(-1, keepdim=True) for part in k.split(tile, 2)], -1)
    m = m.amax(-1, keepdim=True)
    total, out = (sinks.view(-1, 1, 1) - m).exp(), 0
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        p = (q @ k_tile.mT * q.shape[-1] ** -0.5 - m).exp()
        total, out = total + p.sum(dim=-1, keepdim=True), out + p @ v_tile
    return out / total


def attend_with_fault(q, k, v, sinks, tile, *, seen=True, rescale=True, scale=None, top=torch.maximum, whole=None,
                      value=0.0):
    m = sinks.view(-1, 1, 1).expand(*q.shape[:3], 1) if seen else q.new_full((*q.shape[:3], 1), -math.inf)
    total, out = torch.full_like(m, float(seen)), torch.full_like(q, value)
    tiles = list(zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True))
    for k_tile, v_tile in tiles[:whole]:
        scores = q @ k_tile.mT * (scale or q.shape[-1] ** -0.5)
        m_new = top(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = (scores - m_new).exp(), (m - m_new).exp() if rescale else 1.0
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total


def without_a_maximum(q, k, v, sinks, tile):
    total, out = sinks.view(-1, 1, 1).exp(), 0
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        p = (q @ k_tile.mT * q.shape[-1] ** -0.5).exp()
        total, out = total + p.sum(dim=-1, keepdim=True), out + p @ v_tile
    return out / total


def whole(q, k, v, sinks, tile):
    return reference_attention(q, k, v, sinks=sinks)


# --- third -----------------------------------------------------------------------------------------------------------


def decode(q, c, k_rope, up_k, up_v):
    N = up_k.shape[1]
    q_latent = torch.einsum("bhtn,hnl->bhtl", q[..., :N], up_k).squeeze(2)  # (B, H, L)
    scores = q_latent @ c.mT + q[:, :, 0, N:] @ k_rope.mT  # (B, H, S)
    weights = (scores * q.shape[-1] ** -0.5).softmax(dim=-1)
    return torch.einsum("bhl,hvl->bhv", weights @ c, up_v).unsqueeze(2)


def decode_in_tiles(q, c, k_rope, up_k, up_v):
    return absorbed(tiled_attention, q, c, k_rope, up_k, up_v)


def decode_head_by_head(q, c, k_rope, up_k, up_v):
    heads = []
    for h, (rows, up) in enumerate(zip(up_k, up_v, strict=True)):
        nope, rope = q[:, h].split([up_k.shape[1], k_rope.shape[-1]], dim=-1)
        scores = (nope @ rows) @ c.transpose(1, 2) + rope @ k_rope.transpose(1, 2)
        heads.append((scores / math.sqrt(q.shape[-1])).softmax(-1) @ c @ up.T)
    return torch.stack(heads, dim=1)


def decode_with_fault(q, c, k_rope, up_k, up_v, *, scale=None, softmax=lambda s: s.softmax(-1), rope=True, first=True):
    N = up_k.shape[1]
    nope, position = (q[:, :, 0, :N], q[:, :, 0, N:]) if first else (q[:, :, 0, -N:], q[:, :, 0, :-N])
    scores = torch.einsum("bhn,hnl->bhl", nope, up_k) @ c.mT
    if rope:
        scores = scores + position @ k_rope.mT
    weights = softmax(scores * (scale or q.shape[-1] ** -0.5))
    return torch.einsum("bhl,hvl->bhv", weights @ c, up_v)[:, :, None]


def expanded(q, *cache):
    return reference_attention(q, *expand(*cache))


def with_values(q, c, k_rope, up_k, up_v):
    """No keys, but the values of all heads."""
    N = up_k.shape[1]
    scores = torch.einsum("bhn,hnl->bhl", q[:, :, 0, :N], up_k) @ c.mT + q[:, :, 0, N:] @ k_rope.mT
    values = torch.einsum("bsl,hvl->bhsv", c, up_v)
    return (scores * q.shape[-1] ** -0.5).softmax(-1)[:, :, None] @ values


def with_copies(q, c, k_rope, up_k, up_v):
    """No keys and no values, but `@` copies the latents for each head."""
    N = up_k.shape[1]
    scores = (q[..., :N] @ up_k) @ c[:, None].mT + q[..., N:] @ k_rope[:, None].mT
    return (scores * q.shape[-1] ** -0.5).softmax(-1) @ c[:, None] @ up_v.mT


def unscaled_softmax(scores):
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


ANSWERS = {
    page.first: Answers(
        right=[Strided, StridedByWhere, StridedByAddition],
        wrong=[
            (partial(OtherHook, masks=False), "your hook gives −∞ and does not say `masks = True`"),
            (partial(OtherHook, slope=lambda scores, h: 1.0), "the dq is not that of the masked and scaled softmax; is "
                                                              "`derivative` right?"),
            (partial(OtherHook, slope=lambda scores, h: scores * (h + 1)), "is `derivative` right?"),
            (partial(OtherHook, slope=lambda scores, h: h), "the dq is not that"),
            (partial(OtherHook, slope=lambda scores, h: None), "your function raises TypeError"),
            (partial(OtherHook, factor=lambda h: h), "stride 1: the output is not that of the masked and scaled"),
            (partial(OtherHook, factor=lambda h: 1), "stride 1: the output is not that of the masked and scaled"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: away % stride != 0), "stride 1: the output is not"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: away < 0), "stride 7: the output is not that of"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: (away <= 0) | (away % stride != 0)),
             "stride 1: the output is not"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: (away < 0) | (k % stride != 0)),
             "stride 7: the output is not"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: (away > 0) | (away % stride != 0)),
             "stride 1: the output is not"),
            (partial(OtherHook, hidden=lambda away, stride, q, k: (away < 0) | (away >= 7)), "stride 1: the output"),
            (partial(OtherHook, value=0.0), "stride 1: the output is not"),
            (lambda stride: Strided(7), "stride 1: the output is not"),
            (lambda stride: ScoreHook(), "stride 1: the output is not"),
            (lambda stride: Strided, "expected a ScoreHook"),
            (Failing, "your function raises RuntimeError"),
            (KeptTiles, "right, but it took")],
        saves_nothing=(Whole, "a T × S mask is 163,840 bytes in booleans"),
    ),
    page.second: Answers(
        right=[attend, attend_in_two_passes, attend_with_the_sink_last, attend_after_the_maximum],
        wrong=[
            (partial(attend_with_fault, seen=False), "200 keys, scores up to 5, sinks near 0: the output is not"),
            (partial(attend_with_fault, rescale=False), "200 keys, scores up to 5, sinks near 0: the output is not"),
            (partial(attend_with_fault, scale=1), "sinks near 0: the output is not"),
            (partial(attend_with_fault, whole=-1), "200 keys, scores up to 5, sinks near 0: the output is not"),
            (partial(attend_with_fault, value=1.0), "sinks near 0: the output is not"),
            (partial(attend_with_fault, top=lambda m, new: m), "near -400: the output is not e^score v, divided by the "
                                                               "sum of e^score and e^sink (it has NaN)"),
            (partial(attend_with_fault, top=lambda m, new: new), "the output is not"),
            (lambda q, k, v, sinks, tile: attend(q.zero_(), k, v, sinks, tile), "the output is not e^score v"),
            (without_a_maximum, "1,000 keys, scores up to 173, sinks near 0: the output is not e^score v"),
            (lambda q, k, v, sinks, tile: attend(q, k, v, sinks.flip(0), tile), "the output is not"),
            (lambda q, k, v, sinks, tile: attend(q, k, v, sinks[:1], tile), "the output is not"),
            (lambda q, k, v, sinks, tile: attend(q, k, v, sinks, tile)[0], "the output has the shape (2, 128, 16)"),
            (lambda q, k, v, sinks, tile: attend(q, k, v, sinks, k.shape[2] // 2), "right, but")],
        saves_nothing=(whole, "are enough for any number of keys"),
        same=("m, scores.amax(dim=-1, keepdim=True) → scores.amax(dim=-1, keepdim=True), m",),
    ),
    page.third: Answers(
        right=[decode, decode_in_tiles, decode_head_by_head],
        wrong=[
            (partial(decode_with_fault, scale=40**-0.5), "with 1/√(L + R), where the scale is 1/√(N + R)"),
            (partial(decode_with_fault, scale=16**-0.5), "with 1/√N, where the scale is 1/√(N + R)"),
            (partial(decode_with_fault, scale=1), "with no scale, where the scale is 1/√(N + R)"),
            (partial(decode_with_fault, scale=24**-0.5), "1,000 tokens"),
            (partial(decode_with_fault, rope=False), "the output is not that of the expanded keys and values"),
            (partial(decode_with_fault, first=False), "the output is not that of the expanded keys and values"),
            (partial(decode_with_fault, softmax=unscaled_softmax), "1,000 tokens, 6 heads: the output is not that of "
                                                                   "the expanded keys and values (it has NaN)"),
            (partial(decode_with_fault, softmax=torch.sigmoid), "the output is not that of"),
            (lambda *given: decode(*given).squeeze(2), "the output has the shape (2, 8, 24) and torch.float32, "
                                                       "expected (2, 8, 1, 24)"),
            (with_values, "values of all heads are 786,432"),
            (with_copies, "a copy of c for each head are 1,048,576")],
        saves_nothing=(expanded, "keys of all heads are 524,288"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_a_mask_that_is_kept_is_seen_as_broken():
    hook = page.MaskKeptWhole(torch.arange(8)[None] // 3)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    torch.testing.assert_close(reference_attention(q, k, v, score=hook), reference_attention(
        q, k, v, cu_seqlens=[0, 3, 6, 8]))
    assert hook.mask_B1TS.numel() == 64
