"""The embedding in parts: the numbers of the whole, bytes and traffic to the byte."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from refimpl import memory
from refimpl.comm import FakeCommunicator, simulate
from refimpl.tensor.embedding import VocabularyParallelEmbedding
from refimpl.tensor.vocabulary import part, vocabulary_traffic

V, C = 101, 8
WORLDS = (1, 2, 4)
ALONE = FakeCommunicator(0, 1)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("dtype", "padding_idx"), [(torch.float64, None), (torch.bfloat16, V - 1), (torch.float32, 3)])
@on_ranks("world_size")
def test_embeddings_and_gradients_are_those_of_the_whole(comm, world_size, dtype, padding_idx):
    torch.manual_seed(0)
    whole = nn.Embedding(V, C, dtype=dtype, padding_idx=padding_idx)
    with torch.no_grad():
        whole.weight[0] = float("inf")  # a row that others read in place of theirs must not show
    split = VocabularyParallelEmbedding.of(whole, comm, "wte.weight")
    tokens, upstream = torch.randint(1, V, (5, 7)), torch.randn(5, 7, C, dtype=dtype)
    tokens[0, :3] = V - 1
    expected = whole(tokens)
    expected.backward(upstream)
    comm.reset_traffic()
    with memory.track(split, tokens) as t:
        found = split(tokens)
    kept, sent = t.now.total - t.start.total, comm.traffic
    found.backward(upstream)
    assert comm.traffic == sent and kept == found.nbytes
    assert sent == vocabulary_traffic(35, C, comm.rank, world_size, dtype=dtype) - vocabulary_traffic(
        35, 0, comm.rank, world_size, dtype=dtype)
    first, end = part(V, comm)
    spec = split.weight.shard_spec
    assert (spec.name, spec.shape, spec.offsets, spec.lengths) == ("wte.weight", (V, C), (first, 0), (end - first, C))
    assert split.weight.untyped_storage().nbytes() == (end - first) * C * dtype.itemsize
    assert torch.equal(found, expected) and torch.equal(split.weight.grad, whole.weight.grad[first:end])


def test_a_head_may_share_the_rows():
    split = VocabularyParallelEmbedding.of(nn.Embedding(V, C), ALONE)
    head = nn.Linear(C, V, bias=False)
    head.weight = split.weight
    head(split(torch.tensor([1, 2]))).sum().backward()
    assert split.weight.grad.abs().sum(1).gt(0).all() and "rows 0 … 100 of 101, 8" in repr(split)


class Scaled(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.by = nn.Buffer(torch.tensor(2.0))

    def forward(self, tokens):
        return self.by * super().forward(tokens)


class Direct(nn.Embedding):
    def forward(self, tokens):
        return 2 * nn.functional.embedding(tokens, self.weight)


class Added(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.bias = nn.Parameter(torch.zeros(sizes[1]))


def scaled(comm):
    torch.manual_seed(0)
    whole, tokens = Scaled(V, C), torch.arange(V)
    split, (first, end) = VocabularyParallelEmbedding.of(whole, comm), part(V, comm)
    expected, found = whole(tokens), split(tokens)
    (expected * tokens[:, None]).sum().backward()
    (found * tokens[:, None]).sum().backward()
    assert isinstance(split, Scaled) and split.weight.nbytes == (end - first) * C * 4
    return torch.equal(expected, found) and torch.equal(whole.weight.grad[first:end], split.weight.grad)


def test_a_subclass_computes_what_it_does_with_the_rows_of_all_ranks():
    assert simulate(scaled, 3) == [True] * 3
    with pytest.raises(TypeError, match=r"Direct does not look up rows by super\(\).forward"):
        VocabularyParallelEmbedding.of(Direct(V, C), FakeCommunicator(0, 2))(torch.tensor([1]))


@pytest.mark.parametrize(("make", "error", "said"), [
    (lambda: nn.Embedding(V, C, max_norm=1.0), ValueError, r"wte has max_norm=1\.0"),
    (lambda: nn.Embedding(V, C, scale_grad_by_freq=True), ValueError, "wte has scale_grad_by_freq=True"),
    (lambda: nn.Embedding(V, C, sparse=True), ValueError, "wte has sparse=True"),
    (lambda: Added(V, C), TypeError, "wte is of Added"),
    (lambda: nn.Embedding(1, C), ValueError, "1 rows cannot be split over 2 ranks")])
def test_embeddings_that_cannot_be_split(make, error, said):
    with pytest.raises(error, match=said):
        VocabularyParallelEmbedding.of(make(), FakeCommunicator(0, 2), "wte")


@pytest.mark.parametrize("token", [-1, V])
def test_a_wrong_id_never_gives_zeros(token):
    for comm in (ALONE, FakeCommunicator(1, 2)):
        with pytest.raises(IndexError, match=rf"tokens hold {token}: the vocabulary is 0…100"):
            VocabularyParallelEmbedding.of(nn.Embedding(V, C), comm)(torch.tensor([1, token]))
    with pytest.raises(TypeError, match=r"tokens are torch\.float32"):
        VocabularyParallelEmbedding.of(nn.Embedding(V, C), ALONE)(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="weight has 101 rows: expected 51, rows 50 … 100"):
        VocabularyParallelEmbedding(nn.Parameter(torch.zeros(V, C)), FakeCommunicator(1, 2), V)


def test_ids_without_values_are_taken_for_ids_inside():
    """In a dry run, and on the meta device: what comes out has a shape, and nobody asks for a value."""
    def shape(device):
        split = VocabularyParallelEmbedding.of(nn.Embedding(V, C, device=device), FakeCommunicator(1, 2))
        return split(torch.randint(0, V, (5, 7), device=device)).shape

    assert memory.dry_run(shape, "cpu").result == shape("meta") == (5, 7, C)
