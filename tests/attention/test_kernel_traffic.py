"""Bytes between memory and the chip: the closed form against every load and store of the interpreted kernels."""

import attention_kit as kit
import pytest
import torch
import triton
import triton.language as tl

from refimpl.attention import flash_attention, flash_attention_traffic, reference_attention, triton_forward
from refimpl.attention.kernel_traffic import KernelTraffic, counted, moved
from refimpl.attention.kernels import configs
from refimpl.attention.kernels.configs import Config
from refimpl.attention.kernels.operators import attention_backward, attention_delta, attention_forward

pytestmark = kit.in_the_interpreter()


def read(q, k, v, gradient, causal, window):
    """The KernelTraffic of forward, delta, and the two kernels of the backward together, counted."""
    options = (0.25, causal, window, 0.0, None, None, None, 0, 0)
    with torch.no_grad():
        with counted() as forward:
            out, lse = attention_forward(q, k, v, *options)
        with counted() as delta:
            row_sum = attention_delta(out, gradient, None)
        with counted() as rest:
            attention_backward(gradient, q, k, v, lse, row_sum, *options)
    return [KernelTraffic(x.loaded.total(), x.stored.total()) for x in (forward, delta, rest)]


@pytest.mark.parametrize(("T", "S"), [(50, 37), (20, 61), (61, 20)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 9), (False, 21)])
@pytest.mark.parametrize(("dtype", "tile"), [(torch.float32, (16, 32)), (torch.float16, (32, 16))], ids=str)
def test_every_byte_is_foretold(T, S, causal, window, dtype, tile, monkeypatch):
    monkeypatch.setattr(configs, "INTERPRETED", Config(*tile, 4, 1))
    q, k, v, gradient = kit.inputs(1, 2, 1, T, S, 19, dtype, requires_grad=False)
    said = flash_attention_traffic(q.shape, k.shape, dtype, causal=causal, window=window,
                                   configs=dict.fromkeys(configs.KERNELS, Config(*tile, 4, 1)))
    both = KernelTraffic(*(sum(pair) for pair in zip(said["dkdv"], said["dq"], strict=True)))
    assert [said["forward"], said["delta"], both] == read(q, k, v, gradient, causal, window)


@triton.jit
def every_key(first, end, T, S, band, BLOCK: tl.constexpr):
    return 0, S


def test_a_kernel_that_leaves_no_tile_out_does_not_pass(monkeypatch):
    """The mutant visits every tile and masks: right in value, nothing saved."""
    q, k, v, gradient = kit.inputs(1, 1, 1, 256, 256, 16, requires_grad=False)
    said, expected = flash_attention_traffic(q.shape, k.shape, causal=True), flash_attention(q, k, v, causal=True)
    assert said["forward"].loaded - q.nbytes == (k.nbytes + v.nbytes) * (1 + 2 + 3 + 4) / 4
    assert read(q, k, v, gradient, True, None)[0] == said["forward"]
    monkeypatch.setattr(triton_forward, "key_range", every_key)
    torch.testing.assert_close(flash_attention(q, k, v, causal=True), expected)
    assert read(q, k, v, gradient, True, None)[0] == flash_attention_traffic(q.shape, k.shape)["forward"]


def test_bytes_by_tensor():
    q, k, v, _ = kit.inputs(1, 4, 2, 128, 64, 16, requires_grad=False)
    with counted(q=q, k=k, v=v) as traffic:
        out = flash_attention(q, k, v)
    assert traffic.loaded == {"q": q.nbytes, "k": 4 * k.nbytes, "v": 4 * v.nbytes, "other": 0}
    assert traffic.stored == {"q": 0, "k": 0, "v": 0, "other": out.nbytes + 4 * 4 * 128}
    assert traffic.largest == {"q": 64 * 16, "k": 64 * 16, "v": 64 * 16, "other": 0}
    before = dict(traffic.loaded)
    flash_attention(q, k, v)  # behind the region nothing is counted
    assert traffic.loaded == before


def test_strided_tensors_are_told_apart():
    q, k, v, _ = kit.transposed(*kit.inputs(2, 2, 2, 20, 20, 16))
    with counted(q=q, k=k, v=v) as traffic:
        flash_attention(q, k, v)
    assert [traffic.loaded[name] for name in "qkv"] == [q.nbytes, k.nbytes, v.nbytes]


def test_tiles_of_a_kernel_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match=r"configs of \['backward'\]: expected some of \['delta', 'dkdv', 'dq', 'forw"):
        flash_attention_traffic((1, 1, 8, 8), (1, 1, 8, 8), configs={"backward": Config(16, 16, 4, 1)})


def test_a_process_that_compiles_has_no_such_meter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="in Triton's interpreter only: set TRITON_INTERPRET=1"), counted():
        pass


def test_what_operators_move():
    q, k, v = torch.randn(3, 1, 2, 64, 16)  # of one storage
    N, once = 4 * 2 * 64 * 64, q.nbytes + k.nbytes + v.nbytes
    with moved() as dense:
        reference_attention(q, k, v)
    # Q Kᵀ writes the scores; scale and softmax read and write them; P V reads them
    assert (dense.loaded, dense.stored) == (once + 3 * N, q.nbytes + 3 * N) and dense.by_operator["aten.mul"] == (N, N)
    with moved() as flash:
        flash_attention(q, k, v)
    assert (flash.loaded, flash.stored) == (once, q.nbytes + 4 * 2 * 64)


def test_views_and_memory_that_is_only_handed_out_move_nothing():
    x = torch.ones(8, 8)
    with moved() as traffic:
        y = torch.empty(64).view(8, 8).mT.unsqueeze(0)
        x.expand(4, 8, 8).unbind()
        assert traffic.loaded == traffic.stored == 0
        y.add_(x)
        assert (traffic.loaded, traffic.stored) == (512, 256)
        x[:4] + x[4:].sum()
        x.expand(4, 8, 8) * 2  # read once
    assert traffic.by_operator["aten.mul"] == (256, 1024)
    assert traffic.by_operator["aten.add"] == (128 + 4, 128) and traffic.by_operator["aten.sum"] == (128, 4)
