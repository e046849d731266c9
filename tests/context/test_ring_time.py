"""Where a ring's time goes, with computation and links of known speed: idle ranks, and how much of the link hides."""

import time

import pytest
import torch
from patience import about, against_the_clock
from rank_pool import at_once, on_ranks, pooled

from refimpl.comm import Link, compute
from refimpl.comm.rank_timeline import timeline
from refimpl.context import AttentionPair, dense_pair, ring_attention
from refimpl.context.closed_forms import idle_share, work
from refimpl.context.ring import blocks_seen

N, B, H, D, TOKENS = 4, 1, 1, 8, 8  # TOKENS: of a rank
STEP = 0.15  # seconds that a block of TOKENS queries and TOKENS keys takes; causal: half


def timed(seconds):
    """Return a pair that takes `seconds` for a whole block, and in proportion for parts of it; backward twice."""
    def take(q, k, causal, times=1):
        pairs = q.shape[2] * k.shape[2] * (0.5 if causal else 1)
        compute(times * seconds * pairs / TOKENS**2, "attention")

    def forward(q, k, v, *, causal, scale):
        take(q, k, causal)
        return dense_pair.forward(q, k, v, causal=causal, scale=scale)

    def backward(d_out, q, k, v, out, lse, *, causal, scale):
        take(q, k, causal, 2)
        return dense_pair.backward(d_out, q, k, v, out, lse, causal=causal, scale=scale)

    return AttentionPair(forward, backward)


def seconds_of(comm, order, tries=3):
    """Return [(seconds until the last rank is through, seconds that this rank computed)] of forwards."""
    x, found = torch.randn(B, H, TOKENS, D), []
    for _ in range(tries):
        comm.barrier()
        begin = time.monotonic()
        with timeline() as line:
            ring_attention(x, x, x, comm, causal=True, order=order, attention=timed(STEP))
        comm.barrier()
        found.append((time.monotonic() - begin, line.seconds("attention")))
    return found


@pytest.mark.parametrize("order", ["plain", "zig-zag"])
@against_the_clock
def test_the_idle_share_of_each_order(order):
    ranks = pooled(seconds_of, N, order)
    shares = [1 - sum(busy for _, busy in tries) / (N * max(seconds for seconds, _ in tries))
              for tries in zip(*ranks, strict=True)]
    expected = idle_share(N, order)
    assert expected == pytest.approx((N - 1) / (2 * N - 1) if order == "plain" else 0)
    about(shares, expected, 0.05)
    for r, tries in enumerate(ranks):
        assert min(busy for _, busy in tries) == pytest.approx(STEP * sum(work(N, order, 1)[r]), rel=0.05, abs=0.002)


@pytest.mark.parametrize("order", ["plain", "zig-zag"])
@pytest.mark.parametrize("N", [1, 2, 4, 8])
def test_the_work_of_the_closed_form_is_that_of_the_blocks(N, order):
    T = 8
    for r, steps in enumerate(work(N, order, T)):
        for step, pairs in enumerate(steps):
            seen = blocks_seen(r, (r - step) % N, T, True, order)
            rows, keys, causal = seen or (slice(0, 0), slice(0, 0), False)
            assert pairs == len(range(T)[rows]) * len(range(T)[keys]) * (0.5 if causal else 1)


LINK_STEP = 0.1  # seconds that a block computes


def over_a_link(comm, share, tries=3):
    """Return [(seconds on the link, waited for, hidden)] of forwards in which a hop takes `share` of a block's time."""
    x, found = torch.randn(B, H, TOKENS, D), []
    comm.link = Link(bytes_per_second=2 * x.nbytes / (share * LINK_STEP))
    for _ in range(tries):
        comm.barrier()
        with timeline() as line:
            ring_attention(x, x, x, comm, attention=timed(LINK_STEP))
        found.append(tuple(read("send_recv") for read in (line.seconds, line.waited, line.hidden)))
    return found


@pytest.mark.parametrize("share", [0.6, 1.5])
@against_the_clock
def test_the_part_of_the_link_behind_computation(share):
    """A hop begins with a block's computation, and its span lasts until it is waited for. So of each of N − 1 hops,
    min(hop, block) is hidden."""
    hop = share * LINK_STEP
    expected = (N - 1) * hop, (N - 1) * max(0, hop - LINK_STEP), (N - 1) * min(hop, LINK_STEP)
    for tries in pooled(over_a_link, N, share):
        about([hidden for _, _, hidden in tries], expected[2], 0.1 * expected[2])
        about([waited for _, waited, _ in tries], expected[1], 0.1 * (N - 1) * hop)


@pytest.mark.alone
@on_ranks(N)
def test_one_that_waits_first_hides_nothing(comm):
    """The mutant that waits for a hop before it computes."""
    comm.send_recv = at_once(comm.send_recv)
    assert max(hidden for _, _, hidden in over_a_link(comm, 0.6)) < 0.3 * (N - 1) * 0.6 * LINK_STEP
