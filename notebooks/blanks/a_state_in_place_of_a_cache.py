"""What readers build on the page *A state in place of a cache*: some tokens at once, between two states."""

import torch

from exercises import off
from exercises.a_state_in_place_of_a_cache import apart, gates_of, rule_inputs
from refimpl import memory
from refimpl.papers.linear_attention import recurrent

from . import blank

HINTS = {"chunk": [
    "The right-hand side is `beta * (v - (gamma * k) @ s)`: v without what the old state answers to k.",
    "A is `beta * (k @ k.mT) * fading`. `torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)` "
    "reads it below the diagonal alone, and takes ones on the diagonal.",
    "`fading[..., -1, :]` is the last row of Γ: what is left of each token at the end of the chunk. `gamma[:, :, -1:]` "
    "is what is left of the old state."]}

# name: (tokens, D, V, the mean of ln a)
CASES = {"nothing fades": (5, 4, 3, None), "one token": (1, 4, 3, -1.0), "gates": (16, 8, 5, -1.0),
         "many tokens": (64, 16, 24, -0.1), "fast fading": (64, 8, 8, -20.0)}


def chunk(q, k, v, beta, gamma, fading, s):
    """Return (o, the state after the chunk) of C tokens; make no state between them.

    q and k are (B, H, C, D), v is (B, H, C, V), and s, the state before the chunk, is
    (B, H, D, V). beta and gamma, β and γ, are (B, H, C, 1). fading, Γ, is (B, H, C, C):
    row i and column j have what is left of token j at token i, and 0 where j > i.
    """
    right = beta * (v - (gamma * k) @ s)
    system = beta * (k @ k.mT) * fading
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = (gamma * q) @ s + (q @ k.mT * fading) @ u
    rest = fading[..., -1, :].unsqueeze(-1)
    return o, gamma[:, :, -1:] * s + (rest * k).mT @ u


@blank(chunk, "parity and bytes", (torch.Tensor, torch.Tensor))
def check_chunk(chunk):
    """Compare with the recurrent form in fp64, and read the bytes of a forward and backward in fp32."""
    for name, (C, D, V, fades) in CASES.items():
        given = rule_inputs(2, 3, C, D, V, fades=fades)
        said, right = chunk(*as_asked(*given)), recurrent(*given)
        for what, mine, truth in zip(("o", "the state"), said, right, strict=True):
            if wrong := apart(mine, truth, what):
                return f"{name}, {C} token{'s' * (C > 1)}: {wrong}"
    C, D, V = 64, 64, 64
    given = [x.float().requires_grad_() for x in rule_inputs(1, 2, C, D, V)]
    with memory.track(*given) as t:
        said = chunk(*as_asked(*given))
        sum(x.sum() for x in said).backward()
    for what, mine, truth in zip(("o", "the state"), said, recurrent(*given), strict=True):
        if wrong := off(mine, truth, "that of the recurrent form"):
            return f"in fp32: {what}{wrong}"
    took, every = t.peak.total - t.start.total, 4 * 2 * C * D * V
    return (f"right, but forward and backward of {C} tokens take {took:,} bytes; a state for each token would take "
            f"{every:,}, and a chunk needs none of them") if took > every else None


def as_asked(q, k, v, log_a, beta, s):
    """Return what `chunk` is called with."""
    return q, k, v, beta.unsqueeze(-1), *gates_of(log_a), s
