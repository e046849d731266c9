"""The vocabulary in parts: the numbers of the whole, bytes and traffic to the byte, and a version that gathers all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import on_ranks, pooled
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.tensor import vocabulary
from refimpl.tensor.embedding import VocabularyParallelEmbedding
from refimpl.tensor.vocabulary import gather_logits, part, vocabulary_parallel_cross_entropy

N, V, C = 96, 101, 8
WORLDS = (1, 2, 4)
ALONE = FakeCommunicator(0, 1)


@given(st.integers(1, 64), st.data())
def test_parts_are_balanced_and_follow_each_other(n, data):
    V = data.draw(st.integers(n, 60000))
    parts = [part(V, (rank, n)) for rank in range(n)]
    sizes = {end - first for first, end in parts}
    assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][1] == V
    assert max(sizes) - min(sizes) <= 1 and max(sizes) == -(-V // n)
    assert part(V, FakeCommunicator(n - 1, n)) == parts[-1]


def test_more_ranks_than_rows():
    with pytest.raises(ValueError, match="3 rows cannot be split over 4 ranks"):
        part(3, (0, 4))


@pytest.mark.parametrize("world_size", WORLDS)
@on_ranks("world_size")
def test_all_logits_on_every_rank(comm, world_size):
    torch.manual_seed(0)
    first, end = part(V, comm)
    whole = torch.randn(2, 3, V)
    mine = whole[..., first:end].clone().requires_grad_()
    found = gather_logits(mine, comm, V)
    upstream = torch.randn_like(whole)
    found.backward(upstream)
    assert torch.equal(found, whole) and torch.equal(mine.grad, upstream[..., first:end])


# --- cross-entropy ---------------------------------------------------------------------------------------------------


def test_a_loss_leaves_its_logits_as_they_are_unless_it_is_asked_to_overwrite_them():
    for options, stays in (({}, True), ({"overwrite": True}, False)):
        logits = torch.ones(2, V, requires_grad=True)
        vocabulary_parallel_cross_entropy(logits, torch.tensor([3, 5]), ALONE, V, **options).backward()
        assert (logits == 1).all() == stays


def cases(ignored):
    """Yield (name, logits, targets)."""
    for name in ("ordinary", "some ignored", "all ignored", "extreme", "masked", "target masked", "small ids"):
        torch.manual_seed(1)
        z, t = torch.randn(N, V, dtype=torch.float64), torch.randint(0, V, (N,))
        if name == "some ignored":
            t[::3] = ignored
        elif name == "all ignored":
            t.fill_(ignored)
        elif name == "extreme":
            z *= 1e4
        elif name == "masked":
            z[:, 40:] = float("-inf")  # on four ranks two have nothing else
            t %= 40
        elif name == "target masked":
            z[5, t[5]] = float("-inf")
        yield name, z, t.int() if name == "small ids" else t


def apart(found, expected):
    """The largest distance; infinite unless NaN and infinities are in the same places."""
    finite = expected.isfinite()
    if not torch.equal(found[~finite].nan_to_num(7), expected[~finite].nan_to_num(7)):
        return float("inf")
    return (found - expected)[finite].abs().max().item() if finite.any() else 0.0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("dtype", "value", "gradient"), [
    (torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-5, 2**-7),
    (torch.float16, 1e-5, 2**-9)])
@on_ranks("world_size")
def test_losses_and_gradients_are_those_of_the_whole(comm, world_size, dtype, value, gradient):
    first, end = part(V, comm)
    exact = dtype if dtype.itemsize > 2 else torch.float32
    for options in ({}, {"reduction": "sum", "ignore_index": 7}, {"reduction": "none", "label_smoothing": 0.1},
                    {"label_smoothing": 0.3, "overwrite": True}, {"label_smoothing": 1.0}, {"overwrite": True}):
        for name, z, t in cases(options.get("ignore_index", -100)):
            z = z.to(dtype)
            mine = z[:, first:end].clone().requires_grad_()
            whole = z.to(exact).requires_grad_()
            expected = F.cross_entropy(whole, t.long(), **{key: options[key] for key in options if key != "overwrite"})
            upstream = torch.randn(expected.shape, dtype=exact)
            expected.backward(upstream)
            loss = vocabulary_parallel_cross_entropy(mine, t, comm, V, chunk_bytes=7 * V * 8, **options)
            loss.backward(upstream)
            assert loss.dtype == exact and mine.grad.dtype == dtype
            scale = max(1, expected.detach().nan_to_num(0, 0, 0).abs().max().item())
            assert apart(loss.detach(), expected.detach()) / scale <= value, (name, options)
            assert apart(mine.grad, whole.grad[:, first:end].to(dtype)) <= gradient, (name, options)


@on_ranks(4)
def test_no_tokens_and_one_row_on_each_rank(comm):
    (first, end), n = part(V, comm), comm.world_size
    logits = torch.zeros(0, end - first, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    loss = vocabulary_parallel_cross_entropy(logits, targets, comm, V, reduction="sum")
    loss.backward()
    rows = VocabularyParallelEmbedding.of(nn.Embedding(n, C), comm)
    rows(targets).sum().backward()
    one = vocabulary_parallel_cross_entropy(torch.full((1, 1), float(comm.rank)), torch.tensor([n - 1]), comm, n)
    expected = F.cross_entropy(torch.arange(float(n))[None], torch.tensor([n - 1]))
    assert loss.item() == 0 and not rows.weight.grad.any() and torch.allclose(one, expected)


def loss_of_four(**options):
    given = {"logits": torch.zeros(4, V), "targets": torch.zeros(4, dtype=torch.int64), "comm": ALONE, "V": V}
    return vocabulary_parallel_cross_entropy(**given | options)


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"targets": torch.tensor([0, 1, V, 2])}, IndexError, "targets hold 101: the vocabulary is 0…100, or ignore_index"),
    ({"targets": torch.tensor([0, -1, 3, 2])}, IndexError, "targets hold -1"),
    ({"targets": torch.zeros(4)}, TypeError, r"targets are torch\.float32"),
    ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, r"logits \(4, 101\) and targets \(3,\)"),
    ({"comm": FakeCommunicator(1, 2)}, ValueError, "expected 51 columns, 50 … 100 of 101, on rank 1 of 2"),
    ({"logits": torch.zeros(4, V, dtype=torch.int64)}, TypeError, r"logits are torch\.int64"),
    ({"reduction": "max"}, ValueError, "reduction='max'"), ({"label_smoothing": 2}, ValueError, "label_smoothing=2")])
def test_what_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        loss_of_four(**options)


def test_no_second_derivatives():
    logits = torch.zeros(4, V, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True for vocabulary_parallel_cross_entropy"):
        torch.autograd.grad(loss_of_four(logits=logits), logits, create_graph=True)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_second_backward(overwrite):
    leaf = torch.randn(4, V, requires_grad=True)
    loss = loss_of_four(logits=leaf * 1, overwrite=overwrite)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    if overwrite:
        with pytest.raises(RuntimeError, match="backward a second time .*compute the loss again"):
            loss.backward()
    else:
        loss.backward()
        assert torch.equal(leaf.grad, 2 * first)


def test_overwritten_logits_are_not_taken_for_what_they_were():
    leaf = torch.randn(4, V, requires_grad=True)
    logits = leaf.exp()  # saves its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of_four(logits=logits, overwrite=True).backward()


@on_ranks(2, fails=r"rank 1 of 2 has other targets .* 1 rows of 4 differ, the first is row 2")
def test_ranks_with_other_targets_are_named(comm):
    targets = torch.zeros(4, dtype=torch.int64)
    targets[2] = 5 * comm.rank  # each is a row of rank 0, so no count of owners would do
    first, end = part(V, comm)
    vocabulary_parallel_cross_entropy(torch.zeros(4, end - first), targets, comm, V)


# --- bytes and traffic -----------------------------------------------------------------------------------------------


def gather_all(logits, targets, comm, V, *, label_smoothing, **options):
    """The mutant: every rank has all logits."""
    whole = gather_logits(logits, comm, V).float()
    return F.cross_entropy(whole, targets, reduction="sum", label_smoothing=label_smoothing)


def measured(comm, loss_of, dtype, smoothing, overwrite, chunk_bytes):
    """Bytes beyond the closed form: saved, and at the two peaks; and whether the traffic is as predicted."""
    (first, end), w = part(V, comm), max(4, dtype.itemsize)
    logits, targets = torch.randn(N, end - first, dtype=dtype).requires_grad_(), torch.randint(0, V, (N,))
    comm.broadcast(targets, 0, out=targets)
    comm.reset_traffic()
    how = {"label_smoothing": smoothing, "overwrite": overwrite, "chunk_bytes": chunk_bytes}
    with memory.track(logits, targets) as t:
        loss = loss_of(logits, targets, comm, V, reduction="sum", **how)
    expected = vocabulary.vocabulary_loss_bytes(N, end - first, dtype, **how)
    saved, peak = t.now.total - t.start.total - w, t.peak.total - t.start.total  # beside the loss itself
    with memory.track(logits, targets, loss) as t:
        loss.backward()
    backward = t.peak.total - logits.nbytes - targets.nbytes - 2 * w  # the loss, and its gradient
    sent = vocabulary.vocabulary_traffic(N, 0, comm.rank, comm.world_size, dtype=dtype, label_smoothing=smoothing)
    return [saved - expected.saved, peak - expected.forward, backward - expected.backward], comm.traffic == sent


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_and_traffic_are_as_predicted_to_the_byte(world_size):
    for how in ((torch.float32, 0.0, False, 2**26), (torch.float32, 0.1, True, 2**26),
                (torch.bfloat16, 0.1, False, 2**26), (torch.bfloat16, 0.0, True, 50 * V * 4 // world_size),
                (torch.float64, 0.0, False, 2**26)):
        for found in pooled(measured, world_size, vocabulary_parallel_cross_entropy, *how):
            assert found == ([0, 0, 0], True), how


def test_gathering_all_logits_fails_the_test_of_bytes():
    for (saved, forward, backward), as_predicted in pooled(measured, 2, gather_all, torch.float32, 0.0, False, 2**26):
        assert saved >= N * (V - 4) * 4 and forward > N * V * 4 and backward > N * V * 4 and not as_predicted


def test_in_a_dry_run_of_gpt2_on_eight_ranks():
    """Fake tensors have no ids to check."""
    def step():
        comm, whole = FakeCommunicator(7, 8), nn.Embedding(50257, C)
        first, end = part(50257, comm)
        embedding = VocabularyParallelEmbedding.of(whole, comm)
        tokens = torch.zeros(16, dtype=torch.int64)
        logits = F.linear(embedding(tokens), embedding.weight)
        vocabulary_parallel_cross_entropy(logits, tokens, comm, 50257).backward()
        assert embedding.weight.grad.shape == (end - first, C) == (6283, C)

    assert memory.dry_run(step).peak.total > 0
    assert [vocabulary.chunk_rows(16, 6283, torch.float32, *chunk_bytes) for chunk_bytes in ((), (1,))] == [16, 1]
