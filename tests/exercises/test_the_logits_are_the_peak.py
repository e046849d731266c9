"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import the_logits_are_the_peak as page
from refimpl.cross_entropy import chunked_linear_cross_entropy

# --- first -----------------------------------------------------------------------------------------------------------


def predict(N, V, C, d, R):
    with_logits = 3 * N * V * 4  # log-softmax, its gradient and that of the logits
    chunk = R * V * (4 if d == 4 else 4 + 2)
    return with_logits, N * C * d + V * C * 4 + chunk


def by_steps(N, V, C, d, R):
    logits = N * V
    nbytes = N * C * d
    nbytes += V * C * torch.float32.itemsize
    nbytes += R * V * torch.float32.itemsize
    if d < 4:
        nbytes += R * V * d
    return 12 * logits, nbytes


def by_tensors(N, V, C, d, R):
    dtype = {2: torch.bfloat16, 4: torch.float32}[d]
    logits, dh = torch.empty(N, V, device="meta"), torch.empty(N, C, dtype=dtype, device="meta")
    dW, chunk = torch.empty(V, C, device="meta"), logits[:R]
    copy = chunk.nbytes if chunk.dtype == dtype else chunk.nbytes + chunk.to(dtype).nbytes
    return 3 * logits.nbytes, dh.nbytes + dW.nbytes + copy


def chunked(nbytes):
    """Return an answer whose second number is another."""
    return lambda *sizes: (predict(*sizes)[0], nbytes(*sizes))


# --- second ----------------------------------------------------------------------------------------------------------


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


def row_by_row(z, targets, smoothing):
    loss = 0.0
    for row, target in zip(z, targets.tolist(), strict=True):
        if target == -100:
            row.zero_()
            continue
        log_p = row.log_softmax(0)
        loss -= (1 - smoothing) * log_p[target].item() + smoothing * log_p.mean().item()
        row.copy_(log_p.exp_()).sub_(smoothing / len(row))
        row[target] -= 1 - smoothing
    return loss


def by_autograd(z, targets, smoothing):
    total = torch.zeros(1)
    for some, t in zip(z.split(4), targets.split(4), strict=True):
        logits = some.clone().requires_grad_()
        loss = F.cross_entropy(logits, t, reduction="sum", label_smoothing=smoothing)
        some.copy_(torch.autograd.grad(loss, logits)[0])
        total += loss.detach()
    return total


def with_copies(z, targets, smoothing, ignored_rows_count=False):
    loss, V = F.cross_entropy(z, targets, reduction="sum", label_smoothing=smoothing), z.shape[1]
    gradient = z.softmax(1) - (1 - smoothing) * F.one_hot(targets.clamp(min=0), V) - smoothing / V
    z.copy_(gradient if ignored_rows_count else gradient.masked_fill_((targets == -100)[:, None], 0))
    return loss


def without_maximum(z, targets, smoothing):
    counts, column = (targets != -100).float(), targets.clamp(min=0)[:, None]
    predicted, mean = z.gather(1, column)[:, 0], z.mean(1)
    total = z.exp_().sum(1)
    z *= (counts / total)[:, None]
    return ((total.log() - (1 - smoothing) * predicted - smoothing * mean) * counts).sum()


def with_ignored_losses(z, targets, smoothing):
    lost = z[targets == -100].logsumexp(1).sum()
    return rows(z, targets, smoothing) + lost


def without_smoothed_gradient(z, targets, smoothing):
    logits = z.clone()
    loss = rows(logits, targets, smoothing)
    rows(z, targets, 0.0)
    return loss


def of_the_mean(z, targets, smoothing):
    loss, n = rows(z, targets, smoothing), (targets != -100).sum()
    z /= n
    return loss


def over_other_words(z, targets, smoothing):
    """Spread the smoothing over the V - 1 words that are not the target."""
    V = z.shape[1]
    return rows(z, targets, smoothing * V / (V - 1))


def that_change_targets(z, targets, smoothing):
    loss = rows(z, targets, smoothing)
    targets.clamp_(min=0)
    return loss


def that_drop_z(z, targets, smoothing):
    loss = rows(z, targets, smoothing)
    z.untyped_storage().resize_(0)
    return loss


def that_drop_the_loss(z, targets, smoothing):
    loss = rows(z, targets, smoothing)
    loss.untyped_storage().resize_(0)
    return loss


# --- third -----------------------------------------------------------------------------------------------------------


def step(hidden, weight, targets, R, z_loss):
    n, loss = (targets != -100).sum(), 0
    dh, dW = torch.empty_like(hidden), torch.zeros_like(weight)
    for first in range(0, len(hidden), R):
        h, t = hidden[first : first + R], targets[first : first + R]
        counts, column, z = (t != -100).float(), t.clamp(min=0)[:, None], h @ weight.T
        L = z.logsumexp(1)
        loss += ((L - z.gather(1, column)[:, 0] + z_loss * L**2) * counts).sum()
        z -= L[:, None]
        z.exp_().mul_((counts * (1 + 2 * z_loss * L))[:, None])
        z.scatter_add_(1, column, -counts[:, None])
        dh[first : first + R] = z @ weight / n
        dW += z.T @ h / n
        del z
    return loss / n, dh, dW


def step_by_library(hidden, weight, targets, R, z_loss):
    h, w = (x.clone().requires_grad_() for x in (hidden, weight))
    loss = chunked_linear_cross_entropy(h, w, targets, chunk_size=R, z_loss=z_loss)
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


def step_by_autograd(hidden, weight, targets, R, z_loss, *, denominator=None, summed=None, keep=False):
    h, w = (x.detach().requires_grad_() for x in (hidden, weight))
    n, total, kept = denominator or (targets != -100).sum().item(), 0.0, []
    for some, t in zip(h.split(R), targets.split(R), strict=True):
        z = some @ w.T
        counts = t != -100
        square = (z.logsumexp(1) ** 2 if summed is None else summed(z))[counts].sum()
        loss = (F.cross_entropy(z, t, reduction="sum") + z_loss * square) / n
        kept.append(loss)
        total += loss.item()
        if not keep:
            kept.pop().backward(retain_graph=False)
        del z, square, loss
    if keep:
        sum(kept).backward()
    return total, h.grad, w.grad


def own_counts(hidden, weight, targets, R, z_loss):
    parts = [step_by_library(hidden[i : i + R], weight, targets[i : i + R], R, z_loss)
             for i in range(0, len(hidden), R)]
    loss, dh, dw = zip(*parts, strict=True)
    return sum(loss) / len(parts), torch.cat(dh) / len(parts), sum(dw) / len(parts)


def without_the_last_chunk(hidden, weight, targets, R, z_loss):
    whole = len(hidden) // R * R
    loss, dh, dW = step(hidden[:whole], weight, targets[:whole], R, z_loss)
    return loss, torch.cat([dh, torch.zeros_like(hidden[whole:])]), dW


def gradients_without_z_loss(hidden, weight, targets, R, z_loss):
    return step(hidden, weight, targets, R, z_loss)[0], *step(hidden, weight, targets, R, 0.0)[1:]


def last_chunk_of_dW(hidden, weight, targets, R, z_loss):
    """`=` for `+=`."""
    last, n = len(hidden) - (len(hidden) % R or R), (targets != -100).sum()
    own = step(hidden[last:], weight, targets[last:], R, z_loss)
    return *step(hidden, weight, targets, R, z_loss)[:2], own[2] * (targets[last:] != -100).sum() / n


def factor_at_the_target(hidden, weight, targets, R, z_loss):
    """Multiply all of softmax - [j = t] by 1 + 2 · z_loss · L."""
    n, L = (targets != -100).sum(), (hidden @ weight.T).logsumexp(1)
    loss, _, _ = step(hidden, weight, targets, R, z_loss)
    _, dh, dW = step(hidden, weight, targets, R, 0.0)
    factor = (1 + 2 * z_loss * L)[:, None]
    g = (hidden @ weight.T).softmax(1) - F.one_hot(targets.clamp(min=0), len(weight))
    return loss, dh * factor, (g * factor * (targets != -100)[:, None]).T @ hidden / n


ANSWERS = {
    page.first: Answers(
        right=[predict, by_steps, by_tensors],
        wrong=[
            (lambda N, V, C, d, R: (N * V * d, 0), "log-softmax, its gradient"),
            (lambda N, V, C, d, R: (3 * N * V * d, predict(N, V, C, d, R)[1]), "in fp32 whatever d is"),
            (lambda N, V, C, d, R: (8 * N * V, predict(N, V, C, d, R)[1]), "log-softmax, its gradient and that of"),
            (chunked(lambda N, V, C, d, R: N * C * d + V * C * d + R * V * (4 if d == 4 else 6)), "dW in fp32 2,101"),
            (chunked(lambda N, V, C, d, R: N * C * d + V * C * 4 + R * V * 4), "R rows once more in d bytes"),
            (chunked(lambda N, V, C, d, R: N * C * 4 + V * C * 4 + R * V * (4 if d == 4 else 6)),
             "dh of all rows in d bytes 67,108,864"),
            (chunked(lambda N, V, C, d, R: N * C * d + V * C * 4 + 12 * R * V), "R rows of logits in fp32 51,463,168"),
            (chunked(lambda N, V, C, d, R: V * C * 4 + R * V * 4), "dh of all rows in d bytes 25,165,824"),
            (lambda *sizes: predict(*sizes)[::-1], "log-softmax, its gradient"),
            (lambda *sizes: predict(*sizes)[0], "expected 2 values (a number, a number)")],
    ),
    page.second: Answers(
        right=[rows, row_by_row, by_autograd],
        wrong=[
            (lambda z, targets, smoothing: rows(z, targets, 0), "the losses add up to"),
            (lambda z, targets, smoothing: rows(z, targets, 0.1), "smoothing 0.3, logits of up to"),
            (partial(with_copies, ignored_rows_count=True), "the loss is right, but z holds another gradient in a row "
             "that is ignored"),
            (without_maximum, "yours to nan (is each row's largest logit subtracted before exp?)"),
            (with_ignored_losses, "the losses add up to"),
            (lambda z, targets, *given: rows(z, targets, *given) / (targets != -100).sum(), "the losses add up to"),
            (without_smoothed_gradient, "z holds another gradient in a row that counts: a number is off by"),
            (of_the_mean, "z holds another gradient in a row that counts"),
            (over_other_words, "z holds another gradient in a row that counts"),
            (lambda z, targets, smoothing: rows(z.clone(), targets, smoothing), "z holds another gradient"),
            (that_change_targets, "your function changes `targets`"),
            (that_drop_z, "z is no longer a tensor in fp32 of its shape"),
            (that_drop_the_loss, "the storage of the loss that you return was freed")],
        saves_nothing=(with_copies, "right, but it took"),
    ),
    page.third: Answers(
        right=[step, step_by_library, step_by_autograd],
        wrong=[
            (lambda hidden, weight, targets, R, z_loss: step(hidden, weight, targets, R, 0.0), "the loss is"),
            (own_counts, "is it the mean of all rows that count"),
            (lambda hidden, weight, targets, R, z_loss: step_by_autograd(
                hidden, weight, targets, R, z_loss, denominator=len(hidden)), "is it the mean of all rows that count"),
            (partial(step_by_autograd, summed=lambda z: z.logsumexp(1)), "with logsumexp² of these rows alone"),
            (partial(step_by_autograd, summed=lambda z: z.exp().sum(1).log() ** 2), "logits of up to"),
            (without_the_last_chunk, "250 rows, R=12, z_loss=0.01"),
            (gradients_without_z_loss, "dh is off by"),
            (factor_at_the_target, "is softmax alone multiplied by 1 + 2"),
            (last_chunk_of_dW, "dW is off by"),
            (lambda *given: (step(*given)[0], *step(*given)[:0:-1]), "expected dh in fp32 of shape (250, 16)"),
            (lambda *given: (*step(*given)[:2], step(*given)[2].T), "expected dW in fp32 of shape (2003, 16)"),
            (lambda *given: (*step(*given)[:2], step(*given)[2].bfloat16()), "expected dW in fp32"),
            (lambda *given: step(*given)[1:], "expected 3 values"),
            (lambda hidden, *given: step(hidden, *given[:2], len(hidden), given[3]), "right, but it took")],
        saves_nothing=(partial(step_by_autograd, keep=True), "right, but it took"),
        same=("del z → pass",),  # then two chunks are there, fewer than autograd's
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
