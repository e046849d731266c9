"""The gated delta rule in chunks against the definition token by token: values, gradients, states, bytes, errors."""

import functools

import delta_rule_kit as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention.linear.chunks import chunk_numbers
from refimpl.attention.linear.delta_rule import delta_rule_bytes, delta_rule_flops, gated_delta_rule, state_bytes
from refimpl.papers import linear_attention as paper

TILED = functools.partial(gated_delta_rule, kernel="tiled")
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def with_state(*args, **options):
    return TILED(*args, return_state=True, **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(T=st.integers(1, 40), D=st.integers(1, 9), V=st.integers(1, 9),
       heads=st.sampled_from([(1, 1), (2, 4), (1, 3)]), delta=st.booleans(), state=st.booleans(),
       scale=st.sampled_from([None, 1.7]), chunk=st.sampled_from([None, 1, 5]))
def test_it_is_the_definition(T, D, V, heads, delta, state, scale, chunk):
    tensors, upstream = kit.inputs(2, *heads, T, D, V, state=state)
    options = {"delta": delta, "scale": scale}
    chunk = chunk if chunk and T % chunk == 0 else None
    for x, y in zip(kit.gradients(with_state, tensors, upstream, chunk=chunk, **options),
                    kit.gradients(kit.by_token, tensors, upstream, **options), strict=True):
        close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_the_definition(dtype):
    kit.check_as_exact(with_state, *kit.inputs(T=150, D=32, V=24, dtype=dtype))


@pytest.mark.parametrize("delta", [True, False])
def test_gradcheck(delta):
    tensors, _ = kit.inputs(1, 1, 2, 5, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: with_state(*x[:5], state_BHDV=x[5], delta=delta, chunk=5), tensors)


def test_keys_that_are_all_the_same_do_not_spoil_the_system():
    """β = 1 and one key: powers of A reach 10¹⁸ in a chunk of 64, and (I + A)⁻¹ has ones alone."""
    (q, k, v, log_decay, beta, _), upstream = kit.inputs(T=128, dtype=torch.float32, state=False)
    one = [q, k[:, :, :1].expand_as(k), v, torch.zeros_like(log_decay), torch.ones_like(beta), None]
    found, wanted = (kit.gradients(rule, [x if x is None else x.detach().requires_grad_() for x in one], upstream)
                     for rule in (with_state, kit.by_token))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at", [1, 17, 64, 99])
def test_a_state_carries_a_sequence_on(at):
    (*tensors, state), _ = kit.inputs(T=100)
    whole, last = with_state(*tensors, state_BHDV=state)
    first, between = with_state(*(x[:, :, :at] for x in tensors), state_BHDV=state)
    second, end = with_state(*(x[:, :, at:] for x in tensors), state_BHDV=between)
    close(torch.cat([first, second], 2), whole)
    close(end, last)
    leaf, *_ = tensors
    close(torch.autograd.grad(second.sum(), state)[0], torch.autograd.grad(whole[:, :, at:].sum(), state)[0])
    assert leaf.grad is None


def test_gates_are_ones_and_no_decay_by_default():
    (q, k, v, log_decay, beta, _), _ = kit.inputs()
    close(TILED(q, k, v), TILED(q, k, v, torch.zeros_like(log_decay), torch.ones_like(beta)))


def test_the_last_state_alone_has_gradients():
    tensors, (_, gradient) = kit.inputs()
    found, wanted = (torch.autograd.grad(rule(*tensors[:5], state_BHDV=tensors[5])[1], tensors[1:], gradient)
                     for rule in (with_state, kit.by_token))
    for x, y in zip(found, wanted, strict=True):
        close(x, y)


def test_any_strides_of_inputs_and_of_the_gradient():
    tensors, upstream = kit.inputs()
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    sums = kit.gradients(with_state, strided, [torch.ones(()).expand_as(x) for x in upstream])
    for x, y in zip(sums, kit.gradients(kit.by_token, tensors, [torch.ones_like(x) for x in upstream]), strict=True):
        close(x, y)


def test_under_autocast_it_computes_what_it_does_outside():
    tensors, upstream = kit.inputs(dtype=torch.bfloat16)
    wanted = kit.gradients(with_state, tensors, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, kit.gradients(with_state, tensors, upstream), wanted))


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
def test_bytes_are_exact(heads, dtype, delta):
    for (D, V), (T, chunk) in [((8, 8), (64, 16)), ((32, 8), (64, 16)), ((8, 32), (64, 16)), ((20, 12), (70, None)),
                               ((4, 6), (20, None)), ((8, 8), (96, 32))]:
        given = kit.inputs(2, *heads, T, D, V, dtype, state=False)
        predicted = delta_rule_bytes((2, heads[0], T, D), (2, heads[1], T, V), dtype, delta=delta, chunk=chunk or 64)
        assert kit.read(TILED, *given, chunk=chunk, delta=delta) == predicted, (D, V, T, chunk)


@pytest.mark.parametrize("delta", [True, False])
def test_a_chunk_leaves_nothing_beside_the_next_one(delta):
    """In few sizes, so that it is read on every push."""
    for D, V in ((8, 8), (8, 32), (32, 8)):
        given = kit.inputs(1, 2, 2, 64, D, V, torch.float32, state=False)
        predicted = delta_rule_bytes((1, 2, 64, D), (1, 2, 64, V), delta=delta, chunk=16)
        assert kit.read(TILED, *given, chunk=16, delta=delta) == predicted


def test_the_mutant_that_has_all_tokens_in_one_chunk_takes_more():
    def parallel(q, k, v, log_decay, beta):
        return paper.parallel(q, k, v, log_decay, beta)

    sizes = (2, 2, 2, 512, 16, 16)
    predicted = delta_rule_bytes((2, 2, 512, 16), (2, 2, 512, 16))
    given = kit.inputs(*sizes, dtype=torch.float32, state=False)
    assert kit.read(TILED, *given) == predicted
    assert kit.read(parallel, *given)[1] > 3 * predicted.peak
    assert chunk_numbers(512, 16, 16, True)[0] * 4 * 4 > predicted.peak  # what the closed form says of it


def test_a_dry_run_of_a_million_tokens_takes_what_the_closed_form_says():
    def step():
        given = [torch.empty(1, 2, 2**20, 8), torch.empty(1, 2, 2**20, 8), torch.empty(1, 2, 2**20, 8),
                 torch.empty(1, 2, 2**20), torch.empty(1, 2, 2**20)]
        return kit.read(TILED, [*given, None], [torch.empty(1, 2, 2**20, 8)])

    assert memory.dry_run(step).result == delta_rule_bytes((1, 2, 2**20, 8), (1, 2, 2**20, 8))


@pytest.mark.parametrize("delta", [True, False])
def test_flops_are_those_of_the_products(delta):
    sizes = (2, 3, 64, 8), (2, 3, 64, 6)
    assert delta_rule_flops(*sizes) == delta_rule_flops(*sizes, delta=True) > delta_rule_flops(*sizes, delta=False)
    for T, chunk in ((64, 16), (70, None)):
        tensors, _ = kit.inputs(2, 3, 3, T, 8, 6, torch.float32, state=False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            TILED(*tensors[:5], chunk=chunk, delta=delta)
        solved = sum(2 * 3 * C * C * 6 for C in ([16] * 4 if chunk else [64, 6]))  # which PyTorch does not count
        assert counter.get_total_flops() + solved * delta == delta_rule_flops(
            (2, 3, T, 8), (2, 3, T, 6), delta=delta, chunk=chunk or 64)


def test_a_state_takes_as_much_after_any_number_of_tokens():
    for T in (3, 300):
        (*tensors, _), _ = kit.inputs(1, 4, 4, T, 8, 8, torch.float32, state=False)
        assert with_state(*tensors)[1].nbytes == state_bytes(layers=1, heads=4, head_dim=8)
    with pytest.raises(ValueError, match="layers=0: expected an int of at least 1"):
        state_bytes(layers=0, heads=4, head_dim=8)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_the_backward_of_the_backward_is_refused():
    tensors, upstream = kit.inputs()
    dq, = torch.autograd.grad(TILED(*tensors[:5]), tensors[0], upstream[0].requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule's backward is not diff.* itself: use refimpl.papers"):
        dq.sum().backward()


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"chunk": 7}, ValueError, "chunk=7 with 40 tokens: expected a divisor, such as 5, or None"),
    ({"chunk": 0}, ValueError, "chunk=0: expected an int of at least 1"),
    ({"kernel": "cuda"}, ValueError, "kernel='cuda': expected one of 'auto', 'triton', 'tiled'"),
    ({"scale": -1.0}, ValueError, "scale=-1.0: expected a finite number above 0"),
    ({"v_BHTV": torch.zeros(2, 3, 40, 5)}, ValueError, "H a multiple of G"),
    ({"v_BHTV": torch.zeros(2, 4, 39, 5)}, ValueError, r"v of shapes .*\(2, 4, 39, 5\)"),
    ({"v_BHTV": torch.zeros(2, 4, 40, 5, dtype=torch.float64)}, ValueError, "k of dtype torch.float32 and v of .*64"),
    ({"q_BGTD": torch.zeros(2, 4, 40, 8)}, ValueError, "expected q and k"),
    ({"beta_BHT": torch.ones(2, 4, 40, dtype=torch.int64)}, TypeError, "beta is a torch.int64: expected a floating"),
    ({"log_decay_BHT": torch.zeros(2, 4)}, ValueError, r"log_decay of shape \(2, 4\) on cpu: expected \(2, 4, 40\)"),
    ({"state_BHDV": torch.zeros(2, 4, 5, 8)}, ValueError, r"state of shape \(2, 4, 5, 8\) .*expected \(2, 4, 8, 5\)"),
], ids=str)
def test_what_does_not_fit_is_named(change, error, words):
    (*tensors, _), _ = kit.inputs(dtype=torch.float32, state=False)
    names = ("q_BGTD", "k_BGTD", "v_BHTV", "log_decay_BHT", "beta_BHT")
    with pytest.raises(error, match=words):
        gated_delta_rule(**{**dict(zip(names, tensors, strict=True)), "kernel": "tiled"} | change)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_transforms_of_torch_func_are_refused(transform):
    (*tensors, _), _ = kit.inputs(state=False)
    with pytest.raises(RuntimeError, match="gated_delta_rule under torch.func's"):
        transform(lambda q: TILED(q, *tensors[1:]))(tensors[0].detach())
