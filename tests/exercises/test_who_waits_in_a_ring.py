"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import who_waits_in_a_ring as page
from refimpl.context import ulysses_attention
from refimpl.model import softmax_attention


def to_heads(comm, x):
    N, H = comm.world_size, x.shape[1]
    parts = comm.all_to_all(x.unflatten(1, (N, H // N)).movedim(1, 0).contiguous())  # (N, B, H/N, T/N, D)
    return parts.movedim(0, 2).flatten(2, 3)


def to_tokens(comm, x):
    parts = comm.all_to_all(x.unflatten(2, (comm.world_size, -1)).movedim(2, 0).contiguous())
    return parts.movedim(0, 1).flatten(1, 2)


def ulysses(comm, q, k, v, attention):
    return to_tokens(comm, attention(to_heads(comm, q), to_heads(comm, k), to_heads(comm, v)))


def in_one_message(comm, q, k, v, attention):
    N = comm.world_size
    parts = torch.stack([torch.stack(each) for each in zip(*(x.chunk(N, 1) for x in (q, k, v)), strict=True)])
    out = attention(*torch.cat(list(comm.all_to_all(parts)), -2))
    return torch.cat(list(comm.all_to_all(torch.stack(out.chunk(N, 2)))), 1)


def every_nth_head(comm, q, k, v, attention):
    """Rank r has the heads r, r + N, …, one after the other."""
    N = comm.world_size
    q, k, v = (torch.cat(list(comm.all_to_all(torch.stack([x[:, r::N] for r in range(N)]))), 2) for x in (q, k, v))
    out = torch.cat([attention(q[:, [h]], k[:, [h]], v[:, [h]]) for h in range(q.shape[1])], 1)
    parts = comm.all_to_all(torch.stack(out.chunk(N, 2)))
    return parts.permute(1, 2, 0, 3, 4).flatten(1, 2)


def by_the_library(comm, q, k, v, attention):
    return ulysses_attention(q, k, v, comm, attention=attention)


def with_fault(comm, q, k, v, attention, *, heads=to_heads, tokens=to_tokens, values=None):
    return tokens(comm, attention(heads(comm, q), heads(comm, k), (values or heads)(comm, v)))


def interleaved(comm, x):
    """What arrives is put together as if ranks had every Nth token."""
    N, H = comm.world_size, x.shape[1]
    parts = comm.all_to_all(x.unflatten(1, (N, H // N)).movedim(1, 0).contiguous())
    return parts.permute(1, 2, 3, 0, 4).flatten(2, 3)


def viewed(comm, x):
    """What arrives is taken for (B, H/N, T, D) as it lies in memory."""
    N, (rows, H, T, D) = comm.world_size, x.shape
    parts = comm.all_to_all(x.unflatten(1, (N, H // N)).movedim(1, 0).contiguous())
    return parts.view(rows, H // N, N * T, D)


def heads_inside_out(comm, x):
    parts = comm.all_to_all(x.unflatten(2, (comm.world_size, -1)).movedim(2, 0).contiguous())
    return parts.movedim(0, 2).flatten(1, 2)


def tokens_side_by_side(comm, x):
    """What comes back is put together as tokens."""
    parts = comm.all_to_all(x.unflatten(2, (comm.world_size, -1)).movedim(2, 0).contiguous())
    return parts.movedim(0, 2).flatten(2, 3)


def gathered_heads(comm, x):
    """The same numbers, of N times the bytes."""
    N = comm.world_size
    return torch.cat(comm.all_gather(x.contiguous()).chunk(N), 2).chunk(N, 1)[comm.rank]


def gathered_tokens(comm, x):
    N = comm.world_size
    return torch.cat(comm.all_gather(x.contiguous()).chunk(N), 1).chunk(N, 2)[comm.rank]


def all_heads(comm, q, k, v, attention):
    """Right, but each rank computes the attention of all heads."""
    N = comm.world_size
    q, k, v = (torch.cat(comm.all_gather(x).chunk(N), 2) for x in (q, k, v))
    return attention(q, k, v).chunk(N, 2)[comm.rank]


def an_attention_of_its_own(comm, q, k, v, attention):
    return ulysses(comm, q, k, v, partial(softmax_attention, causal=True))


def in_16_bits(comm, x):
    return to_heads(comm, x.bfloat16()).float()


def by_torch_distributed(comm, x):
    """The right numbers, past the communicator that counts."""
    N, parts = comm.world_size, [x.new_empty(x.shape) for _ in range(comm.world_size)]
    if N > 1:
        torch.distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts if N > 1 else [x], 2).chunk(N, 1)[comm.rank]


def freed(*given):
    out = ulysses(*given)
    out.untyped_storage().resize_(0)
    return out


ANSWERS = {
    page.first: Answers(
        right=[ulysses, in_one_message, every_nth_head, by_the_library],
        wrong=[
            (lambda comm, q, k, v, attention: attention(q, k, v),
             "rank 0 of 2: attention was given [[(2, 6, 30, 5), (2, 6, 30, 5), (2, 6, 30, 5)]], expected q, k and v of "
             "(2, 3, 60, 5): all 60 tokens of 3 of the 6 heads"),
            (all_heads, "rank 0 of 2: attention was given [[(2, 6, 60, 5)"),
            (lambda comm, q, k, v, attention: attention(*(to_heads(comm, x) for x in (q, k, v))),
             "rank 0 of 2: the output is (2, 3, 60, 5) in torch.float32, expected (2, 6, 30, 5) in torch.float32: all "
             "heads of this rank's tokens"),
            (lambda *given: ulysses(*given).flip(1), "rank 0 of 1: the output is not that of the whole sequence: its "
                                                     "heads are in another order"),
            (partial(with_fault, tokens=heads_inside_out), "rank 0 of 2: the output is not that of the whole sequence: "
                                                           "its heads are in another order"),
            (partial(with_fault, tokens=tokens_side_by_side), "rank 0 of 2: the output is (2, 3, 60, 5)"),
            (partial(with_fault, heads=interleaved), "of 2: the output is not that of the whole sequence"),
            (partial(with_fault, heads=viewed), "of 2: the output is not that of the whole sequence"),
            (partial(with_fault, values=interleaved), "of 2: the output is not that of the whole sequence"),
            (lambda comm, q, k, v, attention: ulysses(comm, q, v, k, attention), "rank 0 of 1: the output is not that"),
            (lambda *given: ulysses(*given).mT.contiguous(), "rank 0 of 1: the output is (2, 4, 5, 60)"),
            (an_attention_of_its_own, "rank 0 of 1: attention was given nothing"),
            (partial(with_fault, values=in_16_bits), "rank 0 of 1: the output is not that of the whole sequence"),
            (partial(with_fault, heads=by_torch_distributed),
             "the output is right, but 3,600 bytes were sent by `comm`"),
            (partial(with_fault, values=gathered_heads), "the output is right, but 18,000 bytes were sent"),
            (freed, "the storage of the output was freed"),
            (lambda comm, *qkv: 3, "expected a tensor, you return 3")],
        saves_nothing=(partial(with_fault, heads=gathered_heads, tokens=gathered_tokens),
                       "rank 0 of 2: the output is right, but 28,800 bytes were sent by `comm`; (N-1)/N of q, k, v and "
                       "the output are 14,400"),
        same=("1, 0 → 0, 1", "0, 1 → 1, 0"),  # two dimensions change places
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
