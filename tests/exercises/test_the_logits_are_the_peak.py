"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import the_logits_are_the_peak as page
from refimpl.cross_entropy import chunked_linear_cross_entropy


def predict(N, V, C, d, R):
    return 3 * N * V * 4, N * C * d + V * C * 4 + R * V * (4 + (d if d == 2 else 0))


def rows(z, targets, smoothing):
    counts, column = (targets != -100).float(), targets.clamp(min=0)[:, None]
    z -= z.amax(1, keepdim=True)
    predicted, mean = z.gather(1, column)[:, 0], z.mean(1)
    total = z.exp_().sum(1)
    loss = ((total.log() - (1 - smoothing) * predicted - smoothing * mean) * counts).sum()
    z *= (counts / total)[:, None]
    z -= smoothing / z.shape[1] * counts[:, None]
    z.scatter_add_(1, column, -(1 - smoothing) * counts[:, None])
    return loss


def with_copies(z, targets, smoothing, ignored_rows_count=False):
    loss, V = F.cross_entropy(z, targets, reduction="sum", label_smoothing=smoothing), z.shape[1]
    gradient = z.softmax(1) - (1 - smoothing) * F.one_hot(targets.clamp(min=0), V) - smoothing / V
    z.copy_(gradient if ignored_rows_count else gradient.masked_fill_((targets == -100)[:, None], 0))
    return loss


def step(hidden, weight, targets, R, z_loss):
    h, w = (x.clone().requires_grad_() for x in (hidden, weight))
    loss = chunked_linear_cross_entropy(h, w, targets, chunk_size=R, z_loss=z_loss)
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


def own_counts(hidden, weight, targets, R, z_loss):
    parts = [step(hidden[i : i + R], weight, targets[i : i + R], R, z_loss) for i in range(0, len(hidden), R)]
    loss, dh, dw = zip(*parts, strict=True)
    return sum(loss) / len(parts), torch.cat(dh) / len(parts), sum(dw) / len(parts)


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (lambda N, V, C, d, R: (N * V * d, 0), "log-softmax, its gradient"),
            (lambda N, V, C, d, R: (12 * N * V, N * C * d + V * C * d + R * V * 4), "dW in fp32")],
    ),
    page.second: Answers(
        right=[rows],
        wrong=[
            (lambda z, targets, smoothing: rows(z, targets, 0), "yours to"),
            (partial(with_copies, ignored_rows_count=True), "a row that is ignored"),
            (with_copies, "right, but it took")],
    ),
    page.third: Answers(
        right=[step],
        wrong=[
            (lambda hidden, weight, targets, R, z_loss: step(hidden, weight, targets, R, 0.0), "loss is another"),
            (own_counts, "is another"),
            (lambda hidden, *given: step(hidden, *given[:2], len(hidden), given[3]), "right, but it took")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
