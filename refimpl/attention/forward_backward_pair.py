"""Forward and backward of an attention as two functions, for callers that go over the keys block by block.

A softmax over many blocks has one logsumexp for each row, which is known when all blocks have been seen. `backward`
takes it, and the output, as they are given: so weights are those of the whole softmax, P = e^(S − L).
"""

import math

from ..common.attention_pair import AttentionPair
from .call.arguments import resolve, without_autocast
from .flash import KERNEL_DTYPES, flash_attention, kernels_run_on
from .kernels.operators import attention_backward, attention_delta
from .tiled import backward_of, tiled_attention


def _forward_by(attention):
    def forward(q_BHTD, k_BGSD, v_BGSD, *, causal=False, scale=None, window=None):
        return attention(q_BHTD, k_BGSD, v_BGSD, causal=causal, scale=scale, window=window, return_logsumexp=True)

    return forward


def _tiled_backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, *, causal=False, scale=None,
                    window=None):
    check_outputs(d_out_BHTD, out_BHTD, q_BHTD, v_BGSD)
    call = resolve(q_BHTD, k_BGSD, v_BGSD, causal=causal, window=window, scale=scale, dropout_p=0.0, seed=None,
                   cu_seqlens=None, cu_seqlens_k=None)
    with without_autocast(q_BHTD.device):
        # the whole softmax's lse, not that of these keys
        return backward_of(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT.unsqueeze(-1), d_out_BHTD, None, call, (128, 128))


def _flash_backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, *, causal=False, scale=None,
                    window=None):
    if not kernels_run_on(q_BHTD.device) or q_BHTD.dtype not in KERNEL_DTYPES:
        return _tiled_backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, causal=causal, scale=scale,
                               window=window)
    check_outputs(d_out_BHTD, out_BHTD, q_BHTD, v_BGSD)
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    # kernels count in base 2
    delta_BHT, lse2_BHT = attention_delta(out_BHTD, d_out_BHTD, None), (lse_BHT / math.log(2)).contiguous()
    return attention_backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, lse2_BHT, delta_BHT, scale, causal, window, 0.0, None,
                              None, None, 0, 0)


def check_outputs(d_out_BHTV, out_BHTV, q_BHTD, v_BGSV):
    """Raise ValueError for an output or its gradient that does not have q's rows and v's head_dim."""
    expected = (*q_BHTD.shape[:3], v_BGSV.shape[3])
    for name, x in (("out", out_BHTV), ("d_out", d_out_BHTV)):
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} of shape {tuple(x.shape)} with v of shape {tuple(v_BGSV.shape)}: expected "
                             f"{expected}")


tiled_pair = AttentionPair(_forward_by(tiled_attention), _tiled_backward)  # in PyTorch, tile by tile
flash_pair = AttentionPair(_forward_by(flash_attention), _flash_backward)  # by Triton kernels where they run
