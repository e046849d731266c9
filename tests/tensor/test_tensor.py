"""Split models beside whole ones: ours, and those of others with defaults; what a rank holds, keeps and sends."""

import gc
import re

import pytest
import torch
from families import LLAMA
from rank_pool import alike, on_ranks, pooled
from tensor_kit import GPTS, OTHERS, SPLITS, V, block_of, bodies, distances, farthest, loss_of, tokens_of, twins
from torch import nn

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator
from refimpl.mixed_precision import autocast
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import ColumnParallelLinear, RowParallelLinear, tensor_parallel
from refimpl.tensor.closed_forms import block_traffic, split_block_terms
from refimpl.tensor.linear import Siblings
from refimpl.tensor.sequence_parallelism import RowsRegion

NAMES, WORLDS = (*GPTS, *OTHERS), (1, 2, 4)
BOTH = pytest.mark.parametrize("split", SPLITS)


@pytest.mark.parametrize("N", WORLDS)
@BOTH
@pytest.mark.parametrize("name", NAMES)
@on_ranks("N")
def test_logits_loss_and_every_gradient_are_those_of_the_unsplit_model(comm, name, split, N):
    far = distances(comm, name, split, torch.float64)
    assert max(far.values()) <= 1e-12, far


@BOTH
@pytest.mark.parametrize("name", ["gpt", "grouped gpt", "gpt2", "llama"])
@on_ranks(2)
def test_in_fp32_too(comm, name, split):
    far = distances(comm, name, split, torch.float32)
    assert max(far.values()) <= 1e-5, far


# --- bytes -----------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 64, "context_length": 16, "layers": 2, "hidden": 64}
EVEN = {"gpt": GPTConfig(**SIZES, heads=4), "grouped gpt": GPTConfig(**SIZES | LLAMA | {"heads": 8, "kv_heads": 4})}
B, T = 2, 16


def kept(comm, name, split, mutant=None):
    """Bytes that two blocks keep more than one, the traffic of as many, and those of the weights."""
    found = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**{**vars(EVEN[name]), "layers": layers}), dtype=torch.float64)
        if mutant != "whole":
            SPLITS[split](model, comm)
        if mutant == "gathered":
            for module in model.modules():
                if isinstance(module, ColumnParallelLinear) and not module.gather_output:
                    module.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
        tokens = tokens_of(model, B, T)
        loss = model(tokens, tokens)  # what is made once has been made
        loss.backward()
        model.zero_grad()
        before = comm.traffic
        with memory.track(model, tokens) as t:
            loss = model(tokens, tokens)
            held = t.now["activations"]
            loss.backward()
        found.append((held, comm.traffic - before, sum(p.nbytes for p in model.parameters())))
    return found[1][0] - found[0][0], found[1][1] - found[0][1], found[1][2] - found[0][2]


def expected_bytes(name, N, split, dtype=torch.float64):
    return sum(split_block_terms(EVEN[name], B, T, N, dtype, by_tokens=split == "sequence").values())


@pytest.mark.parametrize("N", WORLDS)
@BOTH
@pytest.mark.parametrize("name", EVEN)
@on_ranks("N")
def test_activations_traffic_and_weights_of_a_block_are_those_of_the_closed_forms(comm, name, split, N):
    block = GPT(EVEN[name]).blocks[0]
    cut = sum(p.numel() for key, p in block.named_parameters() if p.dim() == 2 or key.endswith(("qkv.bias", "up.bias")))
    rest = sum(p.numel() for p in block.parameters()) - cut
    activations, sent, weights = kept(comm, name, split)
    assert activations == expected_bytes(name, N, split)
    assert sent == block_traffic(EVEN[name], B, T, N, 8, by_tokens=split == "sequence")
    assert weights == 8 * (cut // N + rest)


@on_ranks(2)
def test_a_version_that_splits_nothing_fails_these(comm):
    activations, sent, _ = kept(comm, "gpt", "tensor", "whole")
    assert activations == expected_bytes("gpt", 1, "tensor") > expected_bytes("gpt", 2, "tensor") and sent.total == 0


@on_ranks(2)
def test_a_version_that_keeps_what_it_gathered_fails_these(comm):
    assert kept(comm, "gpt", "sequence", "gathered")[0] > expected_bytes("gpt", 2, "sequence")


def kept_by_forward(N, split):
    torch.manual_seed(0)
    model = SPLITS[split](GPT(EVEN["gpt"]), FakeCommunicator(0, N))
    tokens = tokens_of(model, B, T)
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
        held = t.now.total
    assert loss.isfinite()
    return held


@pytest.mark.parametrize("N", WORLDS)
def test_before_and_behind_the_blocks_no_more_than_rows_are_kept(N):
    """The first norm's input is cut from all tokens: a view of them would keep all."""
    tensor, sequence = (EVEN["gpt"].layers * expected_bytes("gpt", N, split, torch.float32) for split in SPLITS)
    last = B * T * (64 * 4 + 8)
    assert kept_by_forward(N, "tensor") - kept_by_forward(N, "sequence") == tensor - sequence + last - last // N


@pytest.mark.parametrize("tied", [False, True])
def test_splitting_takes_no_more_than_the_model_and_a_layer(tied):
    model = GPT(GPTConfig(**{**vars(EVEN["gpt"]), "layers": 8, "tied": tied}))
    before, largest = sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters())
    with memory.track(model) as t:
        tensor_parallel(model, FakeCommunicator(0, 4))
        gc.collect()
    assert t.peak.total <= before + 2 * largest
    assert t.now.total == sum(p.nbytes for p in model.parameters()) < 0.4 * before


class Masked(nn.Module):
    """Attention that gives the mask of its dropout away."""

    def forward(self, q, k, v, dropout_p=0.0, causal=False):
        self.seen = nn.functional.dropout(torch.ones(64), dropout_p)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@BOTH
@on_ranks(2)
def test_random_numbers_differ_within_the_split_part_and_agree_outside(comm, split):
    torch.manual_seed(0)
    attention, seen = Masked(), []
    model = GPT(GPTConfig(**{**vars(EVEN["gpt"]), "dropout": 0.5}), attention=attention)
    SPLITS[split](model, comm)
    bodies(model)[0].dropout.register_forward_hook(lambda module, args, output: seen.append(output != 0))
    loss_of(model, tokens_of(model, B, T)).backward()
    assert not alike(comm, attention.seen) and alike(comm, torch.get_rng_state())
    assert alike(comm, seen[0]) == (split == "tensor")


def test_a_forward_begins_streams_of_its_own_where_a_recomputation_left_one():
    """A recomputation that fails inside of the split part, or stops early, does not reach its end."""
    drawn = []
    for rank in range(2):
        region, block, x = RowsRegion(FakeCommunicator(rank, 2)), nn.Linear(4, 4), torch.ones(1, 4, 4)
        for _ in range(2):
            torch.manual_seed(0)
            region.enter(block, (x,), {})  # and no end follows
        drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@on_ranks(2)
def test_labels_can_be_scored_on_logits_that_stay_split(comm, name):
    model, reference, tokens = twins(name)
    tensor_parallel(model, comm, loss_parallel=True)
    assert loss_of(model, tokens).item() == pytest.approx(loss_of(reference, tokens).item(), rel=1e-6)
    assert model(input_ids=tokens).logits.shape[-1] == (V // 2, V - V // 2)[comm.rank]


# --- bad input -------------------------------------------------------------------------------------------------------


def three_heads():
    return GPT(GPTConfig(vocab_size=8, context_length=8, layers=1, hidden=6, heads=3))


@pytest.mark.parametrize(("make", "plan", "text"), [
    (three_heads, None, "blocks.0.attention.qkv: 3 heads on 2 ranks"),
    (three_heads, {"block.*.mlp.up": "column"}, "'block.*.mlp.up' matches no module"),
    (three_heads, {"blocks.*.mlp.up": "columns"}, "style 'columns': expected one of column, row"),
    (three_heads, {"blocks.*.norm1": "column"}, "LayerNorm: expected an nn.Linear"),
    (three_heads, {"head": "head"}, "embedding and head share a weight"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), None, "no plan is known for Sequential")])
@on_ranks(2)
def test_what_cannot_be_split_is_refused_by_name(comm, make, plan, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        tensor_parallel(make(), comm, plan)


@on_ranks(2, fails="another model than rank 0", error=CollectiveMismatch)
def test_other_models_on_other_ranks_are_named(comm):
    torch.manual_seed(0)
    tensor_parallel(GPT(EVEN["gpt"] if comm.rank else EVEN["grouped gpt"]), comm)


@on_ranks(2)
def test_every_rank_gets_its_part_of_rank_0s_values(comm):
    models = []
    for seed in (0, comm.rank):
        torch.manual_seed(seed)
        models.append(GPT(EVEN["gpt"]))
    wanted, model = dict(models[0].named_parameters()), tensor_parallel(models[1], comm)
    assert all(torch.equal(p, block_of(wanted[p.shard_spec.name], p.shard_spec)) for p in model.parameters())


# --- layers by themselves --------------------------------------------------------------------------------------------


def an_mlp(comm, in_columns, frozen):
    torch.manual_seed(0)
    up, down = nn.Linear(6, 10).double(), nn.Linear(10, 6).double()
    up.weight.requires_grad_(not frozen)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    wanted = down(up(x).relu())
    wanted.square().sum().backward()
    dx, x.grad = x.grad, None
    first, second = ColumnParallelLinear(up, comm, parts=in_columns), RowParallelLinear(down, comm)
    if len(first.parts) > 1:
        return first(x).shape[-1]
    y = second(first(x).relu())
    y.square().sum().backward()
    return (y - wanted).abs().max().item(), (x.grad - dx).abs().max().item(), first.weights[0].grad is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("N", [1, 2, 4])
def test_features_need_not_be_a_multiple_of_the_ranks(N, frozen):
    assert all(max(y, dx) <= 1e-12 and none == frozen for y, dx, none in pooled(an_mlp, N, None, frozen))


def test_each_part_of_a_fused_layer_is_cut_by_itself():
    assert pooled(an_mlp, 2, (4, 6), False) == [5, 5]


# --- together with others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "ours"])
@BOTH
@on_ranks(2)
def test_under_autocast(comm, split, kind):
    model, reference, tokens = twins("gpt", torch.float32)
    SPLITS[split](model, comm)
    context = torch.autocast("cpu", torch.bfloat16) if kind == "torch" else autocast(torch.bfloat16)
    found = []
    for each in (reference, model):
        with context:
            loss = loss_of(each, tokens)
        loss.backward()
        found.append(loss.item())
    assert found[1] == pytest.approx(found[0], rel=0.01)
    gradients = {key: p.grad for key, p in reference.named_parameters()}
    for p in model.parameters():
        whole_grad = gradients[p.shard_spec.name]
        assert (p.grad - block_of(whole_grad, p.shard_spec)).norm() / whole_grad.norm() < 0.1
        assert p.grad.dtype == torch.float32


@BOTH
@on_ranks(2)
def test_weights_that_are_trained_later(comm, split):
    model, reference, tokens = twins("gpt")
    for each in (model, reference):
        for key, p in each.named_parameters():
            p.requires_grad_("norm" not in key and "bias" not in key)
    SPLITS[split](model, comm)
    for each in (model, reference):
        loss_of(each, tokens).backward()
        each.zero_grad()
        each.requires_grad_(True)
        loss_of(each, tokens).backward()
    assert farthest(model.parameters(), reference) <= 1e-12


@on_ranks(2)
def test_siblings_may_read_something_else(comm):
    """As in attention from a decoder to an encoder."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8).double() for _ in range(3)]
    x, y = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sum(layer(each).square().sum() for layer, each in zip(layers, (x, y, y), strict=True)).backward()
    wanted, x.grad, y.grad = (x.grad, y.grad), None, None
    split = [ColumnParallelLinear(layer, comm, gather_output=True) for layer in layers]
    Siblings(split)
    for _ in range(2):
        x.grad = y.grad = None
        sum(layer(each).square().sum() for layer, each in zip(split, (x, y, y), strict=True)).backward()
    assert max((a - b).abs().max() for a, b in zip(wanted, (x.grad, y.grad), strict=True)) <= 1e-12
    assert split[0].siblings.apart


@BOTH
def test_one_rank_alone_reads_the_bytes_of_rank_0_of_many(split):
    peak, whole_peak = (step_peak(FakeCommunicator(0, N), split) for N in (4, 1))
    assert pooled(step_peak, 4, split)[0] == peak and peak.total < 0.8 * whole_peak.total


def step_peak(comm, split):
    model = SPLITS[split](GPT(EVEN["gpt"]), comm)
    tokens = torch.zeros(B, T, dtype=torch.int64)
    with memory.track(model, tokens) as t:
        model(tokens, tokens).backward()
    return t.peak
