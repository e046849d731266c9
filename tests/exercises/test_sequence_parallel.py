"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn.functional import linear
from users_kit import function_of

from exercises import sequence_parallel as page

# --- first -----------------------------------------------------------------------------------------------------------


def predict(tokens, hidden, world_size, by_tokens):
    x, N = 4 * tokens * hidden, world_size
    kept = 10 * x / N if by_tokens else 2 * x + 8 * x / N
    sends = 5 if by_tokens else 4
    return kept, sends * x * (N - 1) / N


def tensor_by_tensor(tokens, hidden, world_size, by_tokens):
    whole = tokens // world_size if by_tokens else tokens
    norm = 4 * whole * hidden + 2 * 4 * whole  # its input, and two numbers a token
    first, gelu, second = 4 * whole * hidden, *[4 * tokens * 4 * hidden // world_size] * 2
    part = 4 * tokens * hidden // world_size
    collectives = [part] * 5 if by_tokens else [2 * part] * 2
    return norm + first + gelu + second, sum((world_size - 1) * nbytes for nbytes in collectives)


def by_table(tokens, hidden, world_size, by_tokens):
    kept = {(False, 2): 6, (False, 4): 4, (True, 2): 5, (True, 4): 2.5}[by_tokens, world_size]
    sent = {(False, 2): 2, (False, 4): 3, (True, 2): 2.5, (True, 4): 3.75}[by_tokens, world_size]
    return [round(4 * tokens * hidden * each) for each in (kept, sent)]


def with_fault(tokens, hidden, N, by_tokens, *, whole=2, itemsize=4, features=8, sends=(4, 5), of=1):
    x, whole = itemsize * tokens * hidden, 0 if by_tokens else whole
    return x * (whole + (2 + features - whole) / N), sends[by_tokens] * (N - of) / N * x


# --- second ----------------------------------------------------------------------------------------------------------


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, comm, tokens):
        ctx.comm, ctx.tokens = comm, tokens
        ctx.save_for_backward(x, a)
        return linear(comm.all_gather(x)[:tokens], a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        dx = dy @ a
        zeros = dx.new_zeros(-ctx.tokens % ctx.comm.world_size, dx.shape[1])
        da = dy.T @ ctx.comm.all_gather(x)[: ctx.tokens]
        return ctx.comm.reduce_scatter(torch.cat([dx, zeros])), da, None, None


def column(comm, x, a, tokens):
    return Column.apply(x, a, comm, tokens)


def by_freeing(comm, x, a, tokens):
    """The gathered input has no bytes between forward and backward."""
    def forward(ctx, x):
        return comm.all_gather(x)

    whole = function_of(forward, lambda ctx, dx: comm.reduce_scatter(dx)).apply(x)
    y = whole[:tokens] @ a.T
    storage, nbytes = whole.untyped_storage(), whole.nbytes
    storage.resize_(0)

    def gather_again(_):
        storage.resize_(nbytes)
        comm.all_gather(x.detach(), out=whole.data)

    y.register_hook(gather_again)
    return y


def over_padded_rows(comm, x, a, tokens):
    """The product of the zeros is computed, too, and cut off; backward pads what comes."""
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return torch.einsum("th,fh->tf", comm.all_gather(x), a)[:tokens].clone()

    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        rows = torch.zeros(len(x) * comm.world_size, a.shape[0])
        rows[:tokens] = dy
        return comm.reduce_scatter(rows @ a, "avg") * comm.world_size, rows.T @ comm.all_gather(x)

    return function_of(forward, backward).apply(x, a)


def faulty(comm, x, a, tokens, *, cut=True, reduced="scattered", own=False, missing=None):
    n, zeros = len(x), -tokens % comm.world_size if missing is None else missing(tokens, comm.world_size)

    def gathered(x):
        return comm.all_gather(x)[:tokens] if cut else comm.all_gather(x)[:-zeros]

    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return linear(gathered(x), a)

    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        dx, mine = dy @ a, dy[comm.rank * n :][:n]
        rows = torch.cat([dx.new_zeros(zeros if reduced == "in front" else 0, x.shape[1]), dx,
                          dx.new_zeros(0 if reduced == "in front" else zeros, x.shape[1])])
        if reduced == "all":
            dx = comm.all_reduce(rows)[comm.rank * n :][:n].clone()
        elif reduced == "own":
            dx = rows[comm.rank * n :][:n].clone()
        else:
            dx = comm.reduce_scatter(rows, "avg" if reduced == "avg" else "sum")
        return dx, mine.T @ x[: len(mine)] if own else dy.T @ gathered(x)

    return function_of(forward, backward).apply(x, a)


def gathered_x_kept(comm, x, a, tokens, padding=False):
    gather = function_of(
        lambda ctx, x: comm.all_gather(x)[:None if padding else tokens], lambda ctx, dx: comm.reduce_scatter(
            torch.cat([dx, dx.new_zeros(-len(dx) % comm.world_size, dx.shape[1])])))
    return linear(gather.apply(x), a)


def unknown_to_autograd(comm, x, a, tokens):
    return linear(comm.all_gather(x.detach())[:tokens], a)


# --- third -----------------------------------------------------------------------------------------------------------


def dropout(comm, x, p):
    seed = int(torch.randint(2**62, ()))  # the same on all ranks
    random = torch.Generator().manual_seed(seed + comm.rank)
    mask = torch.rand(x.shape, generator=random) >= p
    return x * mask / (1 - p)


def of_all_ranks(comm, x, p):
    """Draw all ranks' masks, and take one of them."""
    mask = (torch.rand(comm.world_size, *x.shape) < 1 - p)[comm.rank].clone()
    return torch.where(mask, x, 0.0).mul(1 / (1 - p))


def in_a_fork(comm, x, p):
    """Another state of torch's own stream, for a moment."""
    seed = torch.randint(2**40, (1,)).item() * comm.world_size + comm.rank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dropped = torch.empty_like(x, dtype=torch.bool).bernoulli_(p)

    def forward(ctx, x):
        ctx.save_for_backward(dropped)
        return x.masked_fill(dropped, 0.0) / (1 - p)

    return function_of(forward, lambda ctx, dy: dy.masked_fill(ctx.saved_tensors[0], 0.0) / (1 - p)).apply(x)


def own_mask(comm, x, p, seed=None, in_fp32=False, keep=True, most=2**62, at=slice(None)):
    begin = int(torch.randint(most, ())) if seed is None else seed
    random = torch.Generator().manual_seed(begin + comm.rank)
    mask = torch.rand(x[at].shape, generator=random) >= p
    mask = mask if keep else ~mask
    mask = mask.expand(x.shape)
    return x * (mask / (1 - p)) if in_fp32 else x * mask / (1 - p)


def same_everywhere(comm, x, p):
    return x * (torch.rand(x.shape) >= p) / (1 - p)


def the_same_each_time(comm, x, p):
    torch.randint(2**62, ())
    return own_mask(comm, x, p, seed=0)


def stream_of_its_own(comm, x, p):
    torch.manual_seed(int(torch.randint(2**62, ())) + comm.rank)
    return same_everywhere(comm, x, p)


def skipping(comm, x, p):
    """Each rank goes on in the common stream where the one before has ended, and leaves it there."""
    for _ in range(comm.rank):
        torch.rand(x.shape)
    return same_everywhere(comm, x, p)


count = 0


def counted(comm, x, p):
    global count
    count += 1
    return own_mask(comm, x, p, seed=1000 * count)


def seed_of_the_next_rank(comm, x, p):
    """A stream that goes on by one, and the rank added to it."""
    state = torch.get_rng_state()
    for number in range(9):
        torch.manual_seed(number)
        if torch.equal(torch.get_rng_state(), state):
            torch.manual_seed(number + 1)
            return own_mask(comm, x, p, seed=number)
    raise ValueError("another stream")


def by_a_message(comm, x, p):
    return own_mask(comm, x, p, seed=int(comm.broadcast(torch.randint(2**62, (1,)), 0)))


def another_mask_behind(comm, x, p):
    y, other = own_mask(comm, x, p), own_mask(comm, torch.ones_like(x), p)
    y.register_hook(lambda gradient: gradient * (other != 0))
    return y


def of_ones(comm, x, p):
    return own_mask(comm, torch.ones_like(x), p) + 0 * x


def by_torch(comm, x, p):
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + comm.rank)
        return torch.nn.functional.dropout(x, p)


ANSWERS = {
    page.first: Answers(
        right=[predict, tensor_by_tensor, by_table],
        wrong=[
            (partial(with_fault, whole=1), "2 ranks, tensor parallel: you say 2,883,584, a rank keeps 3,149,824 bytes"),
            (partial(with_fault, whole=3), "2 ranks, tensor parallel: you say 3,407,872, a rank keeps 3,149,824 bytes"),
            (lambda *given: predict(*given[:3], True),
             "2 ranks, tensor parallel: you say 2,621,440, a rank keeps 3,149,824 bytes"),
            (lambda *given: predict(*given[:3], False), "2 ranks, sequence parallel: you say 3,145,728, a rank keeps"),
            (partial(with_fault, itemsize=2), "2 ranks, tensor parallel: you say 1,572,864, a rank keeps 3,14"),
            (partial(with_fault, features=4), "2 ranks, tensor parallel: you say 2,097,152, a rank keeps 3,14"),
            (partial(with_fault, sends=(4, 4)), "2 ranks, sequence parallel: you say 1,048,576, a rank sends 1,31"),
            (partial(with_fault, sends=(4, 6)), "2 ranks, sequence parallel: you say 1,572,864, a rank sends 1,31"),
            (partial(with_fault, sends=(2, 5)), "2 ranks, tensor parallel: you say 524,288, a rank sends 1,04"),
            (partial(with_fault, of=0), "2 ranks, tensor parallel: you say 2,097,152, a rank sends 1,048,576"),
            (lambda *given: predict(*given)[0], "expected 2 values")],
    ),
    page.second: Answers(
        right=[column, by_freeing, over_padded_rows],
        wrong=[
            (partial(gathered_x_kept, padding=True), "7 tokens: the output is (8, 32), expected (7, 32)"),
            (lambda comm, x, a, tokens: linear(x, a), "the output is (4, 32), expected (7, 32)"),
            (lambda comm, x, a, tokens: column(comm, x, a, tokens).T, "the output is (32, 7), expected (7, 32)"),
            (partial(faulty, cut=False), "rank 0 of 4, 8 tokens: the output is (0, 32), expected (8, 32)"),
            (partial(faulty, missing=lambda tokens, N: 0), "your function raises ValueError"),
            (lambda comm, x, a, tokens: column(comm, x, 2 * a, tokens) - 1, "the output is not X aᵀ"),
            (unknown_to_autograd, "the output is right, but x gets no gradient"),
            (lambda comm, x, a, tokens: column(comm, x, a.detach(), tokens), "but a gets no gradient"),
            (partial(faulty, own=True), "the output is right, but not the gradient of a"),
            (partial(faulty, reduced="own"), "the output is right, but not the gradient of x"),
            (partial(faulty, reduced="avg"), "the output is right, but not the gradient of x"),
            (partial(faulty, reduced="in front"), "the output is right, but not the gradient of x"),
            (partial(faulty, reduced="all"),
             "the gradients are right, but the rank sent 4,096 bytes; 3,072 are enough")],
        saves_nothing=(gathered_x_kept, "bytes more than x and a wait for backward"),
    ),
    page.third: Answers(
        right=[dropout, of_all_ranks, in_a_fork],
        wrong=[
            (same_everywhere, "rank 1 of 2 dropped the same places as another rank"),
            (the_same_each_time, "two dropouts, one after the other, dropped the same places"),
            (seed_of_the_next_rank, "rank 1 of 2 dropped the same places as another rank"),
            (stream_of_its_own, "afterwards the common stream is not the same as on rank 0"),
            (skipping, "rank 1 of 2 dropped the same places as another rank"),
            (counted, "from the same state of the common stream, other places"),
            (by_a_message, "the masks are right, but 24 bytes were sent"),
            (lambda comm, x, p: own_mask(comm, x, p) * (1 - p), "expected x / (1 - p) at 60% of the places, else 0; "
             "you keep 61%, and the first number that you keep is multiplied by 1.000"),
            (partial(own_mask, keep=False), "expected x / (1 - p) at 60% of the places, else 0; you keep 39%"),
            (lambda comm, x, p: own_mask(comm, x, p) * (1 - p) / p, "the first number that you keep is multiplied by"),
            (of_ones, "expected x / (1 - p) at 60% of the places"),
            (lambda comm, x, p: own_mask(comm, x, p).T, "expected a tensor of x's shape and dtype"),
            (lambda comm, x, p: own_mask(comm, x.detach(), p), "the gradient does not have the mask of forward"),
            (another_mask_behind, "the gradient does not have the mask of forward"),
            (by_torch, "the masks are right, but 15,360 bytes wait for backward; a byte an element is 3,840")],
        saves_nothing=(partial(own_mask, in_fp32=True),
                       "the masks are right, but 15,360 bytes wait for backward; a byte an element is 3,840"),
        same=("+ → -", ">= → >"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
