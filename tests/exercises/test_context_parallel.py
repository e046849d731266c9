"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import context_parallel as page
from refimpl.comm.traffic import ring_traffic

# --- first -----------------------------------------------------------------------------------------------------------


def predict(tokens, heads, kv_heads, head_dim, world_size):
    rows = tokens // world_size
    query, logsumexp = 4 * rows * heads * head_dim, 4 * rows * heads
    keys_and_values = 2 * 4 * rows * kv_heads * head_dim
    return 2 * query + keys_and_values + logsumexp, (3 * world_size - 2) * keys_and_values


def by_shapes(tokens, heads, kv_heads, head_dim, world_size):
    T = tokens // world_size
    q = out = torch.empty(heads, T, head_dim, device="meta")
    k = v = torch.empty(kv_heads, T, head_dim, device="meta")
    lse = q[..., 0].contiguous()
    forward = backward = (world_size - 1) * (k.nbytes + v.nbytes)
    gradients = world_size * (k.nbytes + v.nbytes)
    return sum(each.nbytes for each in (q, k, v, out, lse)), forward + backward + gradients


def by_collectives(tokens, heads, kv_heads, head_dim, world_size):
    numbers, whole = (2 * heads + 2 * kv_heads) * head_dim + heads, 8 * tokens * kv_heads * head_dim
    in_a_ring = ring_traffic("all_gather", whole, world_size)
    return 4 * numbers * tokens / world_size, 3 * in_a_ring + whole // world_size


def faulty(tokens, heads, kv_heads, head_dim, world_size, *, gradients=None, lse=True, e=4, split=True, tensors=2):
    T, N = tokens // (world_size if split else 1), world_size
    kv = 2 * e * T * kv_heads * head_dim
    sent = 2 * (N - 1) * kv + (N if gradients is None else gradients(N)) * kv
    return tensors * e * T * heads * head_dim + kv + lse * 4 * T * heads, sent


def every_head_has_keys(tokens, heads, kv_heads, head_dim, world_size):
    return predict(tokens, heads, heads, head_dim, world_size)


def every_row_has_a_vector(tokens, heads, kv_heads, head_dim, world_size):
    return faulty(tokens, heads, kv_heads, head_dim, world_size, tensors=3, lse=False)


def number(kept=None, sent=None):
    """Return `predict`, but for one of its numbers."""
    def changed(*case):
        right = predict(*case)
        return (kept(*case) if kept else right[0]), (sent(*case) if sent else right[1])

    return changed


# --- second ----------------------------------------------------------------------------------------------------------


def merged(outs, lses):
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()
    return (weights[..., None] * outs).sum(0), lse


def merged_by_softmax(outs, lses):
    return torch.einsum("b...,b...d->...d", lses.softmax(0), outs), torch.logsumexp(lses, dim=0)


def merged_one_by_one(outs, lses):
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    for block, its_lse in zip(outs, lses, strict=True):
        new = torch.logaddexp(lse, its_lse)
        base = new.masked_fill(new == -torch.inf, 0)
        out = out * (lse - base).exp()[..., None] + block * (its_lse - base).exp()[..., None]
        lse = new
    return out, lse


def merged_by_the_largest(outs, lses):
    largest = lses.amax(0)
    sums = (lses - largest).exp()
    total = sums.sum(0)
    return (sums.unsqueeze(-1) * outs).sum(0) / total.unsqueeze(-1), largest + total.log()


def without_the_largest(outs, lses):
    sums = lses.exp()
    return (sums[..., None] * outs).sum(0) / sums.sum(0)[..., None], sums.sum(0).log()


def by_the_smallest(outs, lses):
    sums = (lses - lses.amin(0)).exp()
    return (sums[..., None] * outs).sum(0) / sums.sum(0)[..., None], lses.logsumexp(0)


def step_by_step(outs, lses, blocks=None):
    out, lse = outs[0], lses[0]
    for block, its_lse in zip(outs[1:blocks], lses[1:blocks], strict=True):
        new = its_lse + torch.log1p((lse - its_lse).exp())
        out = out * (lse - new).exp()[..., None] + block * (its_lse - new).exp()[..., None]
        lse = new
    return out, lse


def with_lse(found):
    """Return an answer whose logsumexp is another, and whose output is right."""
    return lambda outs, lses: (merged(outs, lses)[0], found(lses))


def with_weights(found):
    """Return an answer whose weights are others, and whose logsumexp is right."""
    return lambda outs, lses: ((found(lses)[..., None] * outs).sum(0), lses.logsumexp(0))


def freed(outs, lses):
    out, lse = merged(outs, lses)
    out.untyped_storage().resize_(0)
    return out, lse


ANSWERS = {
    page.first: Answers(
        right=[predict, by_shapes, by_collectives],
        wrong=[
            (partial(faulty, gradients=lambda N: 0),
             "64 tokens, 4 heads, 4 key heads of 8, 2 ranks: you say 16,384, a rank sends 32,768 bytes; in backward "
             "the gradients of keys and values travel, too"),
            (every_head_has_keys, "8 heads, 2 key heads of 16, 4 ranks: you say 66,560, a rank keeps 41,984 bytes; "
                                  "keys and values have fewer heads than queries"),
            (partial(faulty, lse=False), "you say 16,384, a rank keeps 16,896 bytes; L is kept, too"),
            (every_row_has_a_vector, "you say 20,480, a rank keeps 16,896 bytes"),
            (partial(faulty, gradients=lambda N: N - 1), "; the gradients take one more step"),
            (partial(faulty, gradients=lambda N: N + 2), "; keys and values make N - 1 steps each way"),
            (partial(faulty, split=False), "you say 33,792, a rank keeps 16,896 bytes; that is of the whole sequence"),
            (partial(faulty, e=2), "you say 8,704, a rank keeps 16,896"),
            (partial(faulty, tensors=1), "you say 12,800, a rank keeps 16,896"),
            (lambda *case: predict(*case)[::-1], "you say 32,768, a rank keeps 16,896"),
            (lambda *case: (16_896, 32_768), "96 tokens, 4 heads, 4 key heads of 8, 3 ranks: you say 32,768, a rank "
                                             "sends 57,344"),
            (number(sent=lambda *case: (case[-1] - 1) * 8 * case[0] // case[-1] * case[2] * case[3]),
             "you say 8,192, a rank sends 32,768 bytes; that is of forward alone"),
            (number(kept=lambda *case: predict(*case)[0] + 0.25), "you say 16,896.25, a rank keeps 16,896"),
            (lambda *case: 7, "expected 2 values")],
    ),
    page.second: Answers(
        right=[merged, merged_by_softmax, merged_one_by_one, merged_by_the_largest],
        wrong=[
            (lambda outs, lses: (outs.mean(0), lses.logsumexp(0)), "2 blocks: the output is not that of attention over "
                                                                   "all keys: each block weighs as much"),
            (without_the_largest, "5 blocks, scores about 120: the output is not that of attention over all keys: it "
                                  "has nan or ∞"),
            (by_the_smallest, "3 blocks, some of which a row does not see: the output is not that of attention over "
                              "all keys: it has nan or ∞"),
            (step_by_step, "3 blocks, some of which a row does not see: the output is not"),
            (partial(step_by_step, blocks=2), "3 blocks, some of which a row does not see: the output is not"),
            (with_lse(lambda lses: lses.sum(0)), "2 blocks: the logsumexp is not that of attention over all keys: the "
                                                 "farthest number is off by"),
            (with_lse(lambda lses: lses.amax(0)), "2 blocks: the logsumexp is not"),
            (with_lse(lambda lses: lses.mean(0)), "2 blocks: the logsumexp is not"),
            (with_lse(lambda lses: lses.exp().sum(0).log()), "scores about 120: the logsumexp is not that of attention "
                                                             "over all keys: it has nan or ∞"),
            (with_lse(lambda lses: lses.logsumexp(0, keepdim=True)), "the logsumexp is (1, 2, 6) in torch.float32, "
                                                                     "expected (2, 6)"),
            (with_weights(lambda lses: lses.exp()), "2 blocks: the output is not"),
            (with_weights(lambda lses: lses.softmax(-1)), "2 blocks: the output is not"),
            (with_weights(lambda lses: lses.nan_to_num(neginf=0).softmax(0)), "3 blocks, some of which a row does not "
                                                                              "see: the output is not"),
            (with_weights(lambda lses: lses / lses.sum(0)), "2 blocks: the output is not"),
            (with_weights(lambda lses: (lses - lses.logsumexp(0)).sigmoid()), "2 blocks: the output is not"),
            (lambda outs, lses: (outs[0], lses), "2 blocks: the output is not that of attention over all keys: the "
                                                 "farthest number is off by"),
            (lambda outs, lses: merged(outs, lses)[::-1], "2 blocks: the output is (2, 6) in torch.float32, expected "
                                                          "(2, 6, 8)"),
            (freed, "2 blocks: the output is not that of attention over all keys: its storage was freed")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
