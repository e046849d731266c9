"""The kernels as operators: what torch's own check of an operator asks, and what is refused without a GPU."""

import pytest
import torch
from head_kit import head

from refimpl.cross_entropy.kernels.configs import INTERPRETED as INTERPRETED_TILES
from refimpl.cross_entropy.kernels.operators import check_interpreter, head_backward, head_forward
from refimpl.cross_entropy.triton_backward import empty_used
from refimpl.cross_entropy.triton_forward import forward_kernel

INTERPRETED = type(forward_kernel).__name__ == "InterpretedFunction"
OPTIONS = (-100, 0.1, 0.01, 4.0, 70)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_torch_accepts_the_operators():
    hidden, weight, targets, bias = head(40, 20, 70, needs=False, bias=True)
    for b in (None, bias):
        torch.library.opcheck(head_forward, (hidden, weight, b, targets, *OPTIONS))
        lse = torch.logsumexp(hidden @ weight.T, 1)
        for needs in ((True, True, b is not None), (True, False, False), (False, True, False)):
            dh, dw, db = (torch.zeros_like(x) if need else None
                          for x, need in zip((hidden, weight, b), needs, strict=True))
            used = empty_used(hidden, len(weight), INTERPRETED_TILES) if needs[0] else None
            torch.library.opcheck(head_backward, (hidden, weight, b, targets, lse, torch.ones(()), dh, dw, db, used,
                                                  *OPTIONS, -1.0))


def test_what_cannot_run_is_named():
    if INTERPRETED:
        with pytest.raises(ValueError, match="bfloat16 under TRITON_INTERPRET=1"):
            check_interpreter(torch.zeros(1, dtype=torch.bfloat16))
        check_interpreter(torch.zeros(1))
    else:
        with pytest.raises(RuntimeError, match="need a GPU, or TRITON_INTERPRET=1"):
            check_interpreter(torch.zeros(1))
