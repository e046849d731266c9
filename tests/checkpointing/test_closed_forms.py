"""Peak within 1 % of the tracker, kept bytes and FLOPs exact: each policy, each family, with and without dropout."""

import functools

import families
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.checkpointing import Recomputing, planned, recompute, selective
from refimpl.checkpointing.closed_forms import (
    block_flops,
    extra_flops,
    gpt_costs,
    gpt_peak_bytes,
    kept_bytes,
    recomputed_flops,
)
from refimpl.model import GPT, GPTConfig

GPT2 = {"vocab_size": 256, "context_length": 128, "layers": 4, "hidden": 64, "heads": 4}
LLAMA = GPT2 | families.LLAMA | {"mlp_hidden": 176}
GEMMA = LLAMA | {"head_dim": 24, "activation": "geglu", "qkv_bias": True}
NEOX = GPT2 | families.NEOX
POLICIES = {
    "none": (None, None), "full": ([(0,), (1,), (2,), (3,)], None), "every second": ([(0,), 1, (2,), 3], None),
    "segments": ([(0, 1), 2, 3], None), "nested": ([((0,), 1), (2,), 3], None),
    "attention core": (None, "attention core"), "attention": (None, "attention"), "mlp": (None, "mlp")}


def flops_of_a_step(model, tokens):
    with FlopCounterMode(display=False) as counted:
        model(tokens, tokens).backward()
    return counted.get_total_flops()


@functools.cache
def plain(config, dtype, sequence):
    """(a model whose gradients are there, its tokens, the FLOPs of a step)."""
    torch.manual_seed(0)
    model, tokens = GPT(config, dtype=dtype), torch.randint(0, config.vocab_size, (2, sequence))
    return model, tokens, flops_of_a_step(model, tokens)


class Read:
    """What a GPT under a policy keeps, peaks at, and computes."""

    def __init__(self, config, dtype, sequence, plan, part):
        model, tokens, flops = plain(config, dtype, sequence)
        with selective(model.blocks, part) if part else Recomputing(), planned(model, plan):
            with memory.track(model, tokens) as t:
                loss = model(tokens, tokens)
                self.kept = t.now.total - t.start.total - loss.nbytes
                loss.backward()
            self.flops = flops_of_a_step(model, tokens) - flops
        self.peak = t.peak.total - t.start.total


@pytest.mark.parametrize(("family", "dropout", "dtype", "sequence"), [
    (GPT2, 0.0, torch.float32, 128), (GPT2, 0.1, torch.bfloat16, 32), (LLAMA, 0.0, torch.bfloat16, 128),
    (LLAMA, 0.1, torch.float32, 32), (NEOX, 0.0, torch.float32, 32), (NEOX, 0.1, torch.float32, 128),
    (GEMMA, 0.0, torch.float32, 32)],
    ids=["gpt2", "gpt2-dropout", "llama", "llama-dropout", "neox", "neox-dropout", "gemma"])
@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_and_measured(family, dropout, dtype, sequence, policy):
    config, (plan, part) = GPTConfig(**family | {"dropout": dropout}), POLICIES[policy]
    read, shape = Read(config, dtype, sequence, plan, part), (config, 2, sequence, plan, part)
    assert gpt_peak_bytes(*shape, dtype) == pytest.approx(read.peak, rel=0.01)
    assert kept_bytes(*shape, dtype) == read.kept and extra_flops(*shape) == read.flops


def test_rms_norm_makes_no_copy_of_an_fp32_input():
    """Of a small vocabulary, so that the peak is a block's; a copy is 3 % of it."""
    config = GPTConfig(**LLAMA | {"vocab_size": 32, "layers": 1})
    read = Read(config, torch.float32, 32, None, None)
    assert gpt_peak_bytes(config, 2, 32) == pytest.approx(read.peak, rel=0.001)


def test_norms_after_each_branch_are_refused():
    with pytest.raises(ValueError, match="post_norms=True: this closed form covers two norms in a block"):
        gpt_peak_bytes(GPTConfig(**GPT2, post_norms=True), 2, 32)


def test_every_policy_saves_and_the_forms_tell_them_apart():
    """The mutant is a policy that recomputes nothing: each closed form must be far from what it reads."""
    config, nothing = GPTConfig(**GPT2), Read(GPTConfig(**GPT2), torch.float32, 128, None, None)
    for name, (plan, part) in POLICIES.items():
        if name != "none":
            assert kept_bytes(config, 2, 128, plan, part) < 0.85 * nothing.kept, name
            assert gpt_peak_bytes(config, 2, 128, plan, part) < 0.85 * nothing.peak, name
            assert extra_flops(config, 2, 128, plan, part) > 0, name


def test_one_more_forward_where_nothing_stops_early():
    config, tokens = GPTConfig(**GPT2), torch.zeros(2, 32, dtype=torch.int64)
    model, each, forward = GPT(config), block_flops(config, 2, 32), sum(block_flops(config, 2, 32).values())
    plain = flops_of_a_step(model, tokens)
    with recompute(model.blocks, early_stop=False):
        more = flops_of_a_step(model, tokens) - plain
    assert more == 4 * forward == extra_flops(config, 2, 32, [(i,) for i in range(4)], early_stop=False)
    with recompute(model.blocks):
        again = flops_of_a_step(model, tokens) - plain
    assert again == 4 * (forward - each["down"]) == extra_flops(config, 2, 32, [(i,) for i in range(4)])


def test_a_block_that_ends_in_dropout_runs_its_last_product_again():
    flops = block_flops(GPTConfig(**GPT2), 2, 32)
    assert recomputed_flops(flops, "block", dropout=0.1) == sum(flops.values())
    assert recomputed_flops(flops, "block") == sum(flops.values()) - flops["down"]


def test_costs_are_a_chain_of_blocks_and_a_head():
    chain = gpt_costs(GPTConfig(**GPT2), 2, 32)
    assert len(chain) == 5 and chain.output_bytes == (2 * 32 * 64 * 4,) * 4 + (4,)
    with pytest.raises(ValueError, match="part='heads': expected one of None, 'attention core', 'attention', 'mlp'"):
        gpt_costs(GPTConfig(**GPT2), 2, 32, part="heads")


def test_on_cuda_dropout_masks_are_booleans():
    config = GPTConfig(**GPT2 | {"dropout": 0.1})
    assert gpt_peak_bytes(config, 2, 128, device="cuda") < 0.9 * gpt_peak_bytes(config, 2, 128)
