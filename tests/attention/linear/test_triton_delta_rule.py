"""The kernels of the gated delta rule in Triton's interpreter: as exact as the definition, for every chunk and tile."""

import functools

import attention_kit
import delta_rule_kit as kit
import pytest
import torch

from refimpl import memory
from refimpl.attention.linear import triton_chunks
from refimpl.attention.linear.delta_rule import delta_rule_bytes, gated_delta_rule

pytestmark = attention_kit.in_the_interpreter()
TRITON = functools.partial(gated_delta_rule, kernel="triton")


def with_state(*args, **options):
    return TRITON(*args, return_state=True, **options)


@pytest.mark.parametrize(("sizes", "options"), [
    ((2, 2, 2, 70, 16, 16), {}), ((1, 1, 3, 48, 24, 40), {"chunk": 16}), ((1, 2, 2, 33, 8, 70), {"delta": False}),
    ((2, 1, 2, 64, 40, 8), {"chunk": 32, "scale": 0.3}), ((1, 1, 1, 1, 16, 16), {})], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_exact_as_the_definition(sizes, options, dtype):
    kit.check_as_exact(with_state, *kit.inputs(*sizes, dtype=dtype), **options)


def test_without_a_state_and_without_its_gradient():
    tensors, upstream = kit.inputs(1, 1, 2, 40, 8, 8, torch.float32, state=False)
    found, wanted = (torch.autograd.grad(rule(*tensors[:5]), tensors[:5], upstream[0])
                     for rule in (TRITON, functools.partial(gated_delta_rule, kernel="tiled")))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_gates_that_are_one_number_for_all():
    (q, k, v, *_), _ = kit.inputs(1, 1, 2, 40, 8, 8, torch.float32)
    torch.testing.assert_close(TRITON(q, k, v), gated_delta_rule(q, k, v, kernel="tiled"), rtol=2e-5, atol=2e-5)


def test_what_is_handed_out_is_written_before_it_is_read():
    with attention_kit.memory_full_of_nan(warn_only=True):
        found = kit.gradients(with_state, *kit.inputs(1, 1, 2, 70, 24, 40, torch.float32))
    assert all(x.isfinite().all() for x in found)


def test_two_runs_are_equal_bit_by_bit_for_any_strides():
    tensors, upstream = kit.inputs(1, 2, 2, 40, 16, 16, torch.float32)
    first = kit.gradients(with_state, tensors, upstream)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in upstream]
    assert all(map(torch.equal, first, kit.gradients(with_state, strided, turned)))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
def test_bytes_are_exact(heads, dtype, delta):
    for (D, V), (T, chunk) in [((8, 32), (64, 16)), ((32, 8), (64, 16)), ((20, 12), (40, None)), ((16, 16), (640, 64))]:
        def read():  # in a dry run: the interpreter holds what kernels were given in cycles
            given = kit.inputs(2, *heads, T, D, V, dtype, state=False)  # noqa: B023
            return kit.read(TRITON, *given, chunk=chunk, delta=delta)  # noqa: B023

        predicted = delta_rule_bytes((2, heads[0], T, D), (2, heads[1], T, V), dtype, delta=delta, chunk=chunk or 64,
                                     kernel="triton")
        assert memory.dry_run(read).result == predicted, (D, V, T, chunk)


def test_the_interpreter_takes_what_a_dry_run_says():
    given = kit.inputs(2, 2, 2, 64, 8, 32, torch.float32, state=False)
    assert kit.read(TRITON, *given) == delta_rule_bytes((2, 2, 64, 8), (2, 2, 64, 32), kernel="triton")


def test_a_dry_run_of_a_million_tokens_takes_what_the_closed_form_says():
    def step():
        given = [torch.empty(1, 2, 2**20, 64, dtype=torch.bfloat16) for _ in range(3)]
        return kit.read(TRITON, [*given, *(torch.empty(1, 2, 2**20) for _ in range(2)), None],
                        [torch.empty(1, 2, 2**20, 64, dtype=torch.bfloat16)])

    shape = (1, 2, 2**20, 64)
    assert memory.dry_run(step).result == delta_rule_bytes(shape, shape, torch.bfloat16, kernel="triton")


def test_the_compiler_traces_it_whole():
    tensors, upstream = kit.inputs(1, 1, 2, 20, 16, 16, torch.float32, state=False)
    compiled = torch.compile(lambda *x: TRITON(*x) * 2, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(rule(*tensors[:5]), tensors[:5], upstream[0])
                     for rule in (compiled, lambda *x: TRITON(*x) * 2))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("dtype", "chunk", "words"), [
    (torch.float32, 8, "chunk=8: expected one of 16, 32, 64 for the kernels, or kernel='tiled'"),
    (torch.float64, None, "kernel='triton' for torch.float64 of 8 columns on cpu: the kernels take"),
    (torch.bfloat16, None, "bfloat16 under TRITON_INTERPRET=1")], ids=str)
def test_what_the_kernels_do_not_take_is_named(dtype, chunk, words):
    (q, k, v, *_), _ = kit.inputs(1, 1, 1, 16, 8, 8, dtype)
    with pytest.raises(ValueError, match=words):
        TRITON(q, k, v, chunk=chunk)


def test_wide_heads_are_pytorchs_and_by_name_refused():
    q = k = v = torch.randn(1, 1, 4, 200)
    assert torch.equal(gated_delta_rule(q, k, v), gated_delta_rule(q, k, v, kernel="tiled"))
    with pytest.raises(ValueError, match="torch.float32 of 200 columns on cpu: the kernels take .* up to 128 columns"):
        TRITON(q, k, v)


def test_fp16_does_not_round_a_state_to_what_it_can_hold():
    assert all(kind.primitive_bitwidth == 32 or dtype is torch.bfloat16
               for dtype, (kind, _) in triton_chunks.PRODUCTS.items())
    q = k = torch.ones(1, 1, 16, 16, dtype=torch.float16)
    v = torch.full((1, 1, 16, 16), 20000.0, dtype=torch.float16)  # sixteen of them are beyond 65,504
    out, last = with_state(q / 1e4, k, v, delta=False)
    assert last.eq(320000).all() and out.isfinite().all()
