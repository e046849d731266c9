"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn.functional import linear
from users_kit import function_of

from exercises import sequence_parallel as page


def predict(tokens, hidden, world_size, by_tokens, *, all_in_parts=False, gathered_once=False):
    x, N = 4 * tokens * hidden, world_size
    sent = (5 if by_tokens and not gathered_once else 4) * (N - 1) / N * x
    return x * (10 / N if by_tokens or all_in_parts else 2 + 8 / N), sent


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, comm, tokens, gather):
        ctx.comm, ctx.tokens, ctx.gather = comm, tokens, gather
        ctx.save_for_backward(x, a)
        return linear(comm.all_gather(x)[:tokens], a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        dx = dy @ a
        rows = torch.cat([dx, dx.new_zeros(-ctx.tokens % ctx.comm.world_size, x.shape[1])])
        n = len(x)
        if ctx.gather == "reduced":
            dx = ctx.comm.all_reduce(rows)[ctx.comm.rank * n:][:n]
        else:
            dx = ctx.comm.reduce_scatter(rows)
        if ctx.gather == "own":
            own = dy[ctx.comm.rank * n:][:n]
            return dx, own.T @ x[:len(own)], None, None, None
        return dx, dy.T @ ctx.comm.all_gather(x)[:ctx.tokens], None, None, None


def column(comm, x, a, tokens, gather="again"):
    return Column.apply(x, a, comm, tokens, gather)


def gathered_x_kept(comm, x, a, tokens, padding=False):
    gather = function_of(
        lambda ctx, x: comm.all_gather(x)[:None if padding else tokens], lambda ctx, dx: comm.reduce_scatter(
            torch.cat([dx, dx.new_zeros(-len(dx) % comm.world_size, dx.shape[1])])))
    return linear(gather.apply(x), a)


def unknown_to_autograd(comm, x, a, tokens):
    return linear(comm.all_gather(x.detach())[:tokens], a)


def own_mask(comm, x, p, seed=None, in_fp32=False):
    begin = int(torch.randint(2**62, ())) if seed is None else seed
    random = torch.Generator().manual_seed(begin + comm.rank)
    mask = torch.rand(x.shape, generator=random) >= p
    return x * (mask / (1 - p)) if in_fp32 else x * mask / (1 - p)


def same_everywhere(comm, x, p):
    return x * (torch.rand(x.shape) >= p) / (1 - p)


def the_same_each_time(comm, x, p):
    torch.randint(2**62, ())
    return own_mask(comm, x, p, seed=0)


def stream_of_its_own(comm, x, p):
    torch.manual_seed(int(torch.randint(2**62, ())) + comm.rank)
    return same_everywhere(comm, x, p)


count = 0


def counted(comm, x, p):
    global count
    count += 1
    return own_mask(comm, x, p, seed=1000 * count)


def by_a_message(comm, x, p):
    return own_mask(comm, x, p, seed=int(comm.broadcast(torch.randint(2**62, (1,)), 0)))


def another_mask_behind(comm, x, p):
    y, other = own_mask(comm, x, p), own_mask(comm, torch.ones_like(x), p)
    y.register_hook(lambda gradient: gradient * (other != 0))
    return y


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, all_in_parts=True), "2 ranks, tensor parallel: you say 2,621,440, a rank keeps 3,14"),
            (partial(predict, gathered_once=True), "2 ranks, sequence parallel: you say 1,048,576, a rank sends 1,31")],
    ),
    page.second: Answers(
        right=[column],
        wrong=[
            (partial(gathered_x_kept, padding=True), "7 tokens: the output is (8, 32), expected (7, 32)"),
            (lambda comm, x, a, tokens: linear(x, a), "the output is (4, 32), expected (7, 32)"),
            (unknown_to_autograd, "the output is right, but x gets no gradient"),
            (partial(column, gather="own"), "the output is right, but not the gradient of a"),
            (gathered_x_kept, "bytes more than x and a wait for backward"),
            (partial(column, gather="reduced"), "the gradients are right, but the rank sent 4,096 bytes; 3,072 are enough")],
    ),
    page.third: Answers(
        right=[own_mask],
        wrong=[
            (same_everywhere, "rank 1 of 2 dropped the same places as another rank"),
            (the_same_each_time, "two dropouts, one after the other, dropped the same places"),
            (stream_of_its_own, "afterwards the common stream is not the same as on rank 0"),
            (counted, "from the same state of the common stream, other places"),
            (partial(own_mask, in_fp32=True), "the masks are right, but 16,384 bytes wait for backward; a byte an element is 4,096"),
            (by_a_message, "the masks are right, but 24 bytes were sent"),
            (lambda comm, x, p: own_mask(comm, x, p) * (1 - p), "of ones, p=0.5: expected 2.00 at 50% of the places"),
            (another_mask_behind, "the gradient does not have the mask of forward")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
