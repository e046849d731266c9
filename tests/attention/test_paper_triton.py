"""The forward in one screen of Triton, interpreted, beside the hardened kernel with the same tiles: the same bits."""

import attention_kit as kit
import pytest
import torch
from interpreting import interpreted
from one_screen import check_paper

from benchmarks.compiler.compiled import Case
from benchmarks.compiler.processes import compile_each
from refimpl.attention import reference_attention
from refimpl.papers import flash_attention_triton as paper_triton

TILES = [(16, 16), (32, 16), (16, 32)]


def inputs(T, D=16):
    return [x.detach() for x in kit.inputs(2, 3, 3, T, T, D)[:3]]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_same_bits_and_bytes_as_the_hardened_kernel(tile):
    given = [inputs(T) for T in (1, 16, 33, 48)]
    found = interpreted([("paper_triton_bodies:beside_the_hardened", (*x, *tile), {}) for x in given])
    for (q, k, v), (ours, theirs, kept, peak) in zip(given, found, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert kept == peak == q.nbytes + 4 * q[..., 0].numel()  # O and L, and nothing else
        expected = reference_attention(*(x.double() for x in (q, k, v)), causal=True, return_logsumexp=True)
        torch.testing.assert_close([x.double() for x in ours], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("D", [32, 64])
def test_wider_heads_with_its_own_tiles(D):
    given = inputs(20, D)
    (out, _), = interpreted([("refimpl.papers.flash_attention_triton:attention", given, {})])
    torch.testing.assert_close(out, reference_attention(*given, causal=True), rtol=1e-5, atol=2e-6)


def test_it_compiles_for_a_gpu():
    """For an H100, which need not be here: running values stay in registers, tensor cores compute the products."""
    cases = []
    for dtype, D in (("fp16", 64), ("bf16", 128)):
        tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}:16")
        sizes = {"lse_ptr": "*fp32:16", "T": "i32", "c": "fp32", "D": D, "M": paper_triton.M, "N": paper_triton.N}
        kernel = f"{paper_triton.__name__}:forward_kernel"
        cases.append(Case(kernel, {**tensors, **sizes}, paper_triton.WARPS, 3))
    for compiled in compile_each(cases):
        assert compiled.faults() == [] and compiled.spill_bytes == 0 and compiled.instructions["HGMMA"] > 0


def test_one_that_holds_the_matrix_fails_here():
    q, k, v = inputs(48)
    (_, kept, peak), = interpreted([("paper_triton_bodies:read_dense", (q, k, v), {})])
    assert kept == q.nbytes + 4 * q[..., 0].numel() < peak


def test_one_screen():
    check_paper("attention", "flash_attention_triton", also={"triton"})
