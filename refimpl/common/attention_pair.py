"""The interface of an attention whose forward and backward are called apart, for one block of keys after another."""

from typing import NamedTuple


class AttentionPair(NamedTuple):
    """An attention in two functions, without autograd. T queries and S keys; query heads H, key heads G.

    - `forward(q_BHTD, k_BGSD, v_BGSD, *, causal, scale)` returns (out_BHTD, lse_BHT): the output, in q's dtype or a
      wider one, and the natural logsumexp of each row, in fp32 or wider. `causal`: with T = S. `scale` None: 1/√D.
      For a window over ranks both also take `window`, with T ≤ S: the last query is beside the last key.
    - `backward(d_out_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, *, causal, scale)` returns (dq, dk, dv), where
      `out` and `lse` are of a softmax over more keys than these: weights are e^(S − lse), Δ = rowsum(d_out ∘ out).
    """

    forward: object
    backward: object
