"""The operators as PyTorch sees them: its own checks, torch.compile, fake tensors."""

import pytest
import torch

from refimpl.attention import flash_attention
from refimpl.attention.kernels.operators import attention_backward, attention_delta, attention_forward
from refimpl.attention.triton_forward import forward_kernel

pytestmark = [
    pytest.mark.skipif(type(forward_kernel).__name__ != "InterpretedFunction", reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]

DENSE = (0.25, True, None, 0.0, None, None, None, 0, 0)


def given(kit, transposed=False):
    q, k, v, gradient = kit.inputs(1, 2, 1, 20, 20, 16)
    if transposed:
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    return q, k, v, gradient


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [
    DENSE, (0.25, False, 4, 0.3, torch.tensor(7), None, None, 0, 0),
    (1.0, True, 4, 0.0, None, *[torch.tensor([0, 9, 20], dtype=torch.int32)] * 2, 11, 11)],
    ids=["dense", "dropout", "packed"])
def test_opcheck(options, transposed, kit):
    q, k, v, d_out = given(kit, transposed)
    torch.library.opcheck(attention_forward, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse2 = attention_forward(q, k, v, *options)
    torch.library.opcheck(attention_delta, (out, d_out, None))
    torch.library.opcheck(attention_delta, (out, d_out, lse2))
    torch.library.opcheck(attention_backward, (d_out, q, k, v, lse2, attention_delta(out, d_out, None), *options))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3, "dropout_p": 0.2, "seed": 3},
                                     {"cu_seqlens": [0, 5, 20], "causal": True}], ids=str)
def test_compiled_in_one_graph(options, kit):
    q, k, v, gradient = given(kit)
    compiled = torch.compile(lambda *x: flash_attention(*x, **options), fullgraph=True, backend="aot_eager")
    for a, b in zip(*(kit.gradients(f, q, k, v, gradient) for f in (
            compiled, lambda *x: flash_attention(*x, **options))), strict=True):
        assert torch.equal(a, b)


def test_backward_keeps_the_output_and_a_row_of_logsumexps(kit):
    q, k, v, _ = given(kit)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = flash_attention(q, k, v)
    assert [tuple(x.shape) for x in kept] == [q.shape, k.shape, v.shape, out.shape, out.shape[:3]]
