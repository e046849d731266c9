"""The gated delta rule by its Triton kernels: `forward` and `backward` as `chunks` has them."""

import torch

from .operators import delta_rule_backward, delta_rule_forward, delta_rule_inverse, delta_rule_states


def forward(tensors, state_BHDV, call):
    """Return (out_BHTV, the state after the last token). `tensors`: q, k, v, log_decay, beta."""
    inverse_BHTC = _inverse(tensors, call)
    return delta_rule_forward(*tensors, inverse_BHTC, _as_read(state_BHDV), *call[:3])


def backward(d_out_BHTV, d_last_BHDV, tensors, state_BHDV, call):
    """Return the gradients of q, k, v, log_decay, beta and the state."""
    q_BGTD, _, _, log_decay_BHT, beta_BHT = tensors
    inverse_BHTC = _inverse(tensors, call)
    states_BHNDV = delta_rule_states(*tensors, inverse_BHTC, _as_read(state_BHDV), *call[1:3])
    if d_last_BHDV is None:
        states_BHNDV[:, :, -1].zero_()
    else:
        states_BHNDV[:, :, -1] = d_last_BHDV
    d_q_BHTD, d_k_BHTD, d_v_BHTV, d_log_decay_BHT, d_beta_BHT = delta_rule_backward(
        d_out_BHTV, *tensors, inverse_BHTC, states_BHNDV, *call[:3])
    G, d_state_BHDV = q_BGTD.shape[1], None if state_BHDV is None else states_BHNDV[:, :, 0].clone()
    del inverse_BHTC, states_BHNDV
    if d_q_BHTD.shape[1] != G:
        d_q_BHTD, d_k_BHTD = (x.unflatten(1, (G, -1)).sum(2).to(q_BGTD.dtype) for x in (d_q_BHTD, d_k_BHTD))
    return (d_q_BHTD, d_k_BHTD, d_v_BHTV, d_log_decay_BHT.to(log_decay_BHT.dtype), d_beta_BHT.to(beta_BHT.dtype),
            d_state_BHDV)


def _inverse(tensors, call):
    _, k_BGTD, _, log_decay_BHT, beta_BHT = tensors
    return delta_rule_inverse(k_BGTD, log_decay_BHT, beta_BHT, call.chunk) if call.delta else None


def _as_read(state_BHDV):
    """Return a state as the kernels read it, contiguous and in fp32."""
    return None if state_BHDV is None else state_BHDV.to(torch.float32).contiguous()
