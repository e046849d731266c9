"""The kernels of the gated delta rule as operators of PyTorch: what torch.compile, trackers and dry runs see.

    refimpl::delta_rule_inverse     k, log_decay, beta → (I + A)⁻¹ of each chunk
    refimpl::delta_rule_forward     q, k, v, log_decay, beta, the inverse, a state → out, the last state
    refimpl::delta_rule_states      the same → S before each chunk, and a place more
    refimpl::delta_rule_backward    dO and these → dq, dk, dv, d_log_decay, d_beta; S becomes dS
"""

import torch
from torch import Tensor

from ..call.arguments import empty_outputs
from ..kernels.operators import LIBRARY, check_interpreter


@torch.library.custom_op(f"{LIBRARY}::delta_rule_inverse", mutates_args=())
def delta_rule_inverse(k: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Return (B, H, T, chunk) in fp32."""
    from . import triton_chunks

    check_interpreter(k)
    inverse_BHTC = _inverse(log_decay, chunk)
    triton_chunks.inverse_launch(k, log_decay, beta, inverse_BHTC).run(k.device)
    return inverse_BHTC


def _inverse(log_decay, chunk):
    return log_decay.new_empty((*log_decay.shape, chunk), dtype=torch.float32)


@delta_rule_inverse.register_fake
def _(k, log_decay, beta, chunk):
    return _inverse(log_decay, chunk)


@torch.library.custom_op(f"{LIBRARY}::delta_rule_forward", mutates_args=())
def delta_rule_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, inverse: Tensor | None,
                       state: Tensor | None, scale: float, delta: bool, chunk: int) -> tuple[Tensor, Tensor]:
    """Return (out_BHTV, last_BHDV): the latter in fp32."""
    from . import triton_chunks

    check_interpreter(q)
    out_BHTV, last_BHDV = _outputs(k, v)
    triton_chunks.forward_launch(triton_chunks.Problem(scale, delta, chunk), q, k, v, log_decay=log_decay, beta=beta,
                                 inverse=inverse, state=state, out=out_BHTV, last=last_BHDV, states=None).run(q.device)
    return out_BHTV, last_BHDV


def _outputs(k, v):
    (B, H, _, V), D = v.shape, k.shape[3]
    return empty_outputs(v)[0], v.new_empty((B, H, D, V), dtype=torch.float32)


@delta_rule_forward.register_fake
def _(q, k, v, *rest):
    return _outputs(k, v)


@torch.library.custom_op(f"{LIBRARY}::delta_rule_states", mutates_args=())
def delta_rule_states(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, inverse: Tensor | None,
                      state: Tensor | None, delta: bool, chunk: int) -> Tensor:
    """Return (B, H, chunks + 1, D, V) in fp32: S before each chunk; what the last one is, the caller says."""
    from . import triton_chunks

    states_BHNDV = _states(k, v, chunk)
    triton_chunks.forward_launch(triton_chunks.Problem(1.0, delta, chunk), q, k, v, log_decay=log_decay, beta=beta,
                                 inverse=inverse, state=state, out=None, last=None, states=states_BHNDV).run(q.device)
    return states_BHNDV


def _states(k, v, chunk):
    (B, H, T, V), D = v.shape, k.shape[3]
    return v.new_empty((B, H, -(-T // chunk) + 1, D, V), dtype=torch.float32)


@delta_rule_states.register_fake
def _(q, k, v, log_decay, beta, inverse, state, delta, chunk):
    return _states(k, v, chunk)


@torch.library.custom_op(f"{LIBRARY}::delta_rule_backward", mutates_args=("states",))
def delta_rule_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
                        inverse: Tensor | None, states: Tensor, scale: float, delta: bool,
                        chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk) of each head of v, in fp32 if several share one of q and k; (dv, d_log_decay, d_beta)."""
    from . import triton_chunks

    found = _gradients(q, k, v, log_decay)
    named = dict(zip(("dq", "dk", "dv", "d_log_decay", "d_beta"), found, strict=True))
    triton_chunks.backward_launch(triton_chunks.Problem(scale, delta, chunk), q, k, v, log_decay=log_decay, beta=beta,
                                  inverse=inverse, d_out=d_out, states=states, **named).run(q.device)
    return found


def _gradients(q, k, v, log_decay):
    (B, G, T, D), H = k.shape, v.shape[1]
    d_qk = q.dtype if G == H else torch.float32
    rows = [log_decay.new_empty((B, H, T), dtype=torch.float32) for _ in range(2)]
    return *(q.new_empty((B, H, T, D), dtype=d_qk) for _ in range(2)), v.new_empty(v.shape), *rows


@delta_rule_backward.register_fake
def _(d_out, q, k, v, log_decay, *rest):
    return _gradients(q, k, v, log_decay)
