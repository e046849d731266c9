"""A head's loss on a CUDA device: numbers beside fp64, bytes beside the allocator's, kernels beside chunks."""

import math

import pytest
import torch
from head_bodies import split
from head_kit import exact, head, plain, with_gradients

from refimpl import memory
from refimpl.comm import launch
from refimpl.comm.traffic import ring_traffic
from refimpl.cross_entropy import (
    chunked_cross_entropy_bytes,
    chunked_linear_cross_entropy,
    fused_cross_entropy_bytes,
    fused_linear_cross_entropy,
    split_cross_entropy_traffic,
)
from refimpl.mlp import MemoryEfficientMLP, mlp_bytes

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0}
LOSSES = {"chunked": chunked_linear_cross_entropy, "fused": fused_linear_cross_entropy}
pytestmark = pytest.mark.usefixtures("clean")


def on_gpu(*shape, dtype=torch.float32, **how):
    return [x if x is None else x.detach().cuda().requires_grad_(x.requires_grad)
            for x in head(*shape, dtype, scale=0.2, **how)]


def relative(found, expected):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["", "everything"])
@pytest.mark.parametrize("shape", [(1000, 512, 5003), (300, 72, 257)], ids=str)
def test_errors_are_no_larger_than_the_plain_ones(name, dtype, options, shape):
    hidden, weight, targets, bias = on_gpu(*shape, dtype=dtype, bias=True)
    reference = exact(hidden, weight, targets, bias, **options)
    ours, theirs = (relative(with_gradients(loss(hidden, weight, targets, bias=bias, **options), hidden, weight, bias),
                             reference) for loss in (LOSSES[name], plain))
    # A loss's error is luck: a mean of N roundings, of which CUDA's plain loss may have had a small one (read 5.8e-6
    # beside 2.3e-6 in fp16, 1.4e-5 beside 7.0e-6 in bf16). u / √N of a loss of 5 and more is three times as much.
    luck = [torch.finfo(dtype).eps / 2 / math.sqrt(shape[0]) / 5, 0, 0, 0]
    assert all(a <= 1.1 * b + 1e-6 + c for a, b, c in zip(ours, theirs, luck, strict=True)), (ours, theirs)


@pytest.mark.bytes
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_beside_the_allocators(name, dtype):
    N, C, V = 4096, 1024, 50257
    hidden, weight, targets, _ = on_gpu(N, C, V, dtype=dtype, ignored=0)

    def step():
        LOSSES[name](hidden, weight, targets).backward()
        hidden.grad = weight.grad = None

    step()
    with memory.measure("cuda") as m:
        step()
    form = {"chunked": chunked_cross_entropy_bytes, "fused": fused_cross_entropy_bytes}[name]
    predicted = form(N, V, C, dtype, device="cuda").peak
    assert abs(m.peak - predicted) <= 0.02 * predicted < 0.02 * N * V * 4 * 3


def test_skipping_stays_within_its_bound_and_every_run_gives_the_same_bits():
    N, C, V, skip = 1024, 256, 8192, 2.0**-12
    hidden, weight, targets, _ = on_gpu(N, C, V, dtype=torch.bfloat16, ignored=0)
    with torch.no_grad():
        hidden.mul_(0.1).add_(weight[targets] * 4)
    run = {each: [torch.autograd.grad(fused_linear_cross_entropy(
        hidden, weight, targets, reduction="sum", skip=each), (hidden, weight)) for _ in range(2)]
        for each in (None, skip)}
    for first, second in run.values():
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    whole, skipped = run[None][0][0].double(), run[skip][0][0].double()
    bound = min(1, V * skip) * weight.double().norm(dim=1).max()
    rounding = 2**-8 * whole.norm(dim=1)
    assert ((whole - skipped).norm(dim=1) <= bound + rounding).all()


def test_a_vocabulary_split_over_ranks_that_share_one_gpu():
    """Compiled kernels, through gloo and the host's memory; three losses of one head in bf16, and one in fp32."""
    cases = [((300, 72, 5003), torch.float32, 1, EVERYTHING), ((512, 128, 8192), torch.bfloat16, 3, {})]
    for rank, answers in enumerate(launch(split, 2, cases, device="cuda:0")):
        for ((N, C, _), dtype, parts, options), (wrong, _, sent) in zip(cases, answers, strict=True):
            assert max(wrong) < (2e-5 if dtype == torch.float32 else 2e-2), wrong
            rows = split_cross_entropy_traffic(N, C, rank, 2, chunk_size=N, hidden_needs=False,
                                               label_smoothing=options.get("label_smoothing", 0))["all_reduce"]
            dh = ring_traffic("all_reduce", N * C * dtype.itemsize, 2, rank, dtype.itemsize)
            assert sent["all_reduce"] == parts * (rows + dh)


@pytest.mark.bytes
@pytest.mark.parametrize("keep", ["input", "hidden"])
@pytest.mark.parametrize("chunk_size", [None, 512])
def test_an_mlps_bytes_beside_the_allocators(keep, chunk_size):
    N, d, h = 2048, 512, 1408
    mlp = MemoryEfficientMLP(d, h, "swiglu", bias=False, keep=keep, chunk_size=chunk_size, dtype=torch.bfloat16,
                             device="cuda")
    x, upstream = (torch.randn(N, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x.requires_grad_()

    def step():
        mlp.zero_grad()
        x.grad = None
        mlp(x).backward(upstream)

    step()
    mlp.zero_grad()
    x.grad = None
    with memory.measure("cuda") as m:
        step()
    form = mlp_bytes(N, d, h, torch.bfloat16, activation="swiglu", bias=False, keep=keep, chunk_size=chunk_size,
                     device="cuda")
    predicted = max(form.forward, form.backward)
    assert abs(m.peak - predicted) <= 0.02 * predicted
