"""The operators as PyTorch sees them: its own checks, torch.compile, fake tensors."""

import attention_bodies as bodies
import attention_kit as kit
import pytest
import torch

from refimpl.attention import flash_attention

pytestmark = kit.in_the_interpreter()
PACKED = [torch.tensor([0, 9, 20], dtype=torch.int32)] * 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [
    (0.25, True, None, 0.0, None, None, None, 0, 0), (0.25, False, 4, 0.3, torch.tensor(7), None, None, 0, 0),
    (1.0, True, 4, 0.0, None, *PACKED, 11, 11)], ids=["dense", "dropout", "packed"])
def test_opcheck(options, transposed):
    *qkv, d_out = kit.inputs(1, 2, 1, 20, 20, 16)
    bodies.opcheck(*([x.requires_grad_() for x in kit.transposed(*qkv)] if transposed else qkv), d_out, *options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3, "dropout_p": 0.2, "seed": 3},
                                     {"cu_seqlens": [0, 5, 20], "causal": True}], ids=str)
def test_compiled_in_one_graph(options):
    def call(*x):
        return flash_attention(*x, **options)

    compiled, given = torch.compile(call, fullgraph=True, backend="aot_eager"), kit.inputs(1, 2, 1, 20, 20, 16)
    torch.testing.assert_close(*(kit.gradients(f, *given) for f in (compiled, call)), rtol=0, atol=0)


def test_backward_keeps_the_output_and_a_row_of_logsumexps():
    (q, k, v, _), kept = kit.inputs(1, 2, 1, 20, 20, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = flash_attention(q, k, v)
    assert [tuple(x.shape) for x in kept] == [q.shape, k.shape, v.shape, out.shape, out.shape[:3]]
