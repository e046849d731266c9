"""Bytes by closed form, 0 off those of a step; a head with logits and other versions that save nothing are far off."""

import functools
import itertools

import pytest
import torch
from head_kit import head, plain, read
from torch.nn import functional as F

from refimpl import memory
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    default_chunk_size,
    multi_token_cross_entropy,
)
from refimpl.cross_entropy.closed_forms import plain_cross_entropy_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((96, 24, 301), (40, 64, 50), (33, 5, 1000))  # N, C, V
MODELS = {"gpt2": (8192, 50257, 768, torch.float32), "llama-3-8b": (8192, 128256, 4096, torch.bfloat16)}


def as_read(form):
    return form.saved, form.forward, form.peak


@pytest.mark.parametrize(("dtype", "shape"), [*itertools.product(DTYPES, SHAPES)])
def test_plain(dtype, shape):
    N, C, V = shape
    hidden, weight, targets, _ = head(N, C, V, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found = read(lambda: F.cross_entropy((hidden @ weight.T).to(wide), targets), hidden, weight, targets)
    assert found == as_read(plain_cross_entropy_bytes(N, V, C, dtype))


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "shape", "chunk_size"), [  # each two of the three
    (dtype, shape, (7, 32, 200)[(i + j) % 3]) for i, dtype in enumerate(DTYPES) for j, shape in enumerate(SHAPES)])
def test_chunked(dtype, shape, chunk_size):
    N, C, V = shape
    hidden, weight, targets, bias = head(N, C, V, dtype, bias=True)
    for b, softcap, smoothing, z_loss in itertools.product([None, bias], [None, 5.0], [0, 0.1], [0, 0.1]):
        options = {"chunk_size": chunk_size, "softcap": softcap, "label_smoothing": smoothing}
        found = read(lambda: chunked_linear_cross_entropy(hidden, weight, targets, bias=b, z_loss=z_loss, **options),  # noqa: B023
                     hidden, weight, targets, bias)
        assert found == as_read(chunked_cross_entropy_bytes(N, V, C, dtype, bias=b is not None, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["frozen head", "frozen body"])
def test_frozen(dtype, needs):
    hidden, weight, targets, _ = head(64, 24, 301, dtype, needs=False)
    hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    found = read(lambda: chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16), hidden, weight, targets)
    form = chunked_cross_entropy_bytes(64, 301, 24, dtype, chunk_size=16, hidden_needs=needs[0], weight_needs=needs[1])
    assert found == as_read(form)


@pytest.mark.parametrize(("dtype", "shape", "chunk_size"), [
    (dtype, shape, (7, 32, 200)[(i + j) % 3]) for i, dtype in enumerate([torch.bfloat16, torch.float16])
    for j, shape in enumerate(SHAPES)])
def test_sums_in_the_weights_dtype(dtype, shape, chunk_size):
    N, C, V = shape
    hidden, weight, targets, bias = head(N, C, V, dtype, bias=True)
    for b, needs, parts in itertools.product([None, bias], [True, False], [1, 2]):
        options = {"chunk_size": chunk_size, "weight_gradient": dtype}
        given = [hidden.detach().clone().requires_grad_(needs) for _ in range(parts)]
        found = read(lambda: multi_token_cross_entropy(given, weight, [targets] * parts, bias=b, **options)[0],  # noqa: B023
                     *given, weight, targets, bias)
        assert found == as_read(chunked_cross_entropy_bytes(N, V, C, dtype, bias=b is not None, hidden_needs=needs,
                                                            parts=parts, **options))


def test_autocast():
    hidden, weight, targets, _ = head(64, 24, 301)
    hidden = hidden.detach().bfloat16().requires_grad_()
    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            return chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16)

    form = chunked_cross_entropy_bytes(64, 301, 24, torch.bfloat16, weight_dtype=torch.float32, chunk_size=16)
    assert read(compute, hidden, weight, targets) == as_read(form)


def kept(hidden, weight, targets):
    """The chunked gradients, and the logits kept for a backward that does not read them."""
    loss = chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16)
    loss.logits = (hidden.detach() @ weight.detach().T).float()
    return loss


MUTANTS = {"plain": plain, "one chunk": functools.partial(chunked_linear_cross_entropy, chunk_size=10**9),
           "logits kept": kept}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_version_with_logits_is_seen(mutant):
    N, C, V = 256, 16, 997
    hidden, weight, targets, _ = head(N, C, V)
    _, _, peak = read(lambda: MUTANTS[mutant](hidden, weight, targets), hidden, weight, targets)
    form = chunked_cross_entropy_bytes(N, V, C, chunk_size=16)
    assert peak - form.peak > 0.9 * N * V * 4 - 16 * V * 4 > 4 * form.peak / 5


def in_a_dry_run(loss, N, V, C, dtype):
    """(peak above hidden, weight and targets) of a step on fake tensors."""
    hidden, weight = (torch.empty(n, C, dtype=dtype, requires_grad=True) for n in (N, V))
    targets = torch.zeros(N, dtype=torch.int64)
    loss(hidden, weight, targets).backward()


@pytest.mark.parametrize("name", MODELS)
def test_large_heads_in_a_dry_run(name):
    N, V, C, dtype = MODELS[name]
    given = (N * C + V * C) * dtype.itemsize + N * 8
    without = memory.dry_run(in_a_dry_run, chunked_linear_cross_entropy, *MODELS[name]).peak.total - given
    logits = memory.dry_run(in_a_dry_run, plain, *MODELS[name]).peak.total - given
    assert without == chunked_cross_entropy_bytes(N, V, C, dtype).peak
    plain_form = plain_cross_entropy_bytes(N, V, C, dtype).peak
    assert plain_form <= logits <= plain_form + 16 and default_chunk_size(N, V, C) * V * 4 < N * V * 4 / 15
    if name == "llama-3-8b":
        assert V * C * 4 == 2_101_346_304  # of the weight's gradient in fp32, and most of what is left
