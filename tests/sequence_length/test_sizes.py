"""What one block keeps, by the tracker: the difference between a model of two layers and one of one."""

import pytest
import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import Quadratic
from refimpl.sequence_length.sizes import Sizes

ATTENTIONS = {"dense": softmax_attention, "flash": F.scaled_dot_product_attention}


def kept(config, batch, sequence, attention, dtype):
    def forward():
        model, tokens = GPT(config, attention, dtype=dtype), torch.zeros(batch, sequence, dtype=torch.int64)
        return model(tokens, tokens)

    return memory.dry_run(forward).now["activations"]


@pytest.mark.parametrize(("attention", "dtype"), [("dense", torch.float32), ("flash", torch.bfloat16)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_what_a_block_keeps(family, name, attention, dtype):
    sizes = Sizes(family(name), 2, Quadratic(c=1024), dtype, flash=attention == "flash")
    assert (sizes.block_kept.a > 0) == (attention == "dense")
    two, one = (kept(family(name, layers=layers), 2, 100, ATTENTIONS[attention], dtype) for layers in (2, 1))
    assert sizes.block_kept(100) == two - one


def test_of_a_chunk_nothing_is_quadratic(family):
    config = family("gpt2")
    sizes = Sizes(config, 2, Quadratic(c=1024), torch.float32, tokens=Quadratic(c=64), carried=True)
    whole = Sizes(config, 2, Quadratic(c=1024), torch.float32)
    assert sizes.block_kept.a == 0 and sizes.S == Quadratic(b=4 * 2 * 4 * 64)
    assert sizes.U == Quadratic(c=whole.U(64)) and sizes.S(64) == whole.S(64)
