"""What a launch makes constant: an int that is 1 and None become part of the code. The interpreter never does that, so
shapes in which sizes and strides are 1 are compiled here, for a GPU that need not be there."""

import torch

from refimpl.attention.compiled import Case, compile_cases
from refimpl.attention.configs import Config
from refimpl.attention.triton_backward import backward_launches, delta_launch
from refimpl.attention.triton_forward import forward_launch
from refimpl.attention.triton_tile import Problem

CONFIG = Config(32, 32, 8, 2)
SHAPES = [  # B, H, G, T, S, D, dtype, causal, window, dropout_p, packed
    (1, 1, 1, 1, 1, 1, torch.float16, False, None, 0.0, False),
    (1, 1, 1, 1, 1, 16, torch.bfloat16, False, 1, 0.9, True),
    (1, 2, 1, 1, 2, 16, torch.bfloat16, True, 0, 0.0, True),
    (2, 3, 1, 17, 1, 40, torch.bfloat16, True, None, 0.1, False),
]


def launches(B, H, G, T, S, D, dtype, causal, window, dropout_p, packed):
    """All kernels of one attention and its backward; columns lie T and S elements apart."""
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, out, d_out = (empty(B, heads, D, rows).mT for heads, rows in ((H, T), (G, S), (G, S), (H, T), (H, T)))
    lse, delta = empty(B, H, T, dtype=torch.float32), empty(B, H, T, dtype=torch.float32)
    seed = empty(dtype=torch.int64) if dropout_p else None
    ends = empty(2, dtype=torch.int32) if packed else None
    problem = Problem.of(q, k, 0.5, causal, window, dropout_p, seed, ends, ends, T, S)
    return (forward_launch(q, k, v, out, lse, problem, CONFIG), delta_launch(out, d_out, lse, delta, CONFIG),
            *backward_launches(d_out, q, k, v, lse, delta, q, k, v, problem, (CONFIG, CONFIG)))


def test_sizes_of_one_compile():
    cases = [Case.of(launch) for shape in SHAPES for launch in launches(*shape)]
    assert any(1 in case.arguments["q"][1:] for case in cases if "q" in case.arguments)
    found = compile_cases(cases)
    assert [report.name for report in found] == 4 * ["forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"]
    assert not any(report.spill_bytes for report in found)
