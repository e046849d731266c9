"""Split models beside whole ones: ours, and those of others with defaults; what a rank holds, keeps and sends."""

import copy
import gc

import pytest
import torch
from tensor_kit import GPTS, OTHERS, SPLITS, V, block_of, bodies, distances, loss_of, tokens_of, whole
from torch import nn

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator, RankError, launch
from refimpl.mixed_precision import autocast
from refimpl.model import GPT, GPTConfig
from refimpl.parallel import ColumnParallelLinear, RowParallelLinear, tensor_parallel
from refimpl.parallel.closed_forms import block_traffic, split_block_terms
from refimpl.parallel.linear import Siblings

NAMES, WORLDS = (*GPTS, *OTHERS), (1, 2, 4)
BOTH = pytest.mark.parametrize("split", SPLITS)


@pytest.mark.parametrize("N", WORLDS)
@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_every_gradient_are_those_of_the_unsplit_model(name, split, N):
    for rank in launch(distances, N, name, split, torch.float64):
        assert max(rank.values()) <= 1e-12, rank


@BOTH
@pytest.mark.parametrize("name", ["gpt", "grouped gpt", "gpt2", "llama"])
def test_in_fp32_too(name, split):
    for rank in launch(distances, 2, name, split, torch.float32):
        assert max(rank.values()) <= 1e-5, rank


# --- bytes -----------------------------------------------------------------------------------------------------------

EVEN = {"gpt": GPTConfig(vocab_size=64, context_length=16, layers=2, hidden=64, heads=4),
        "grouped gpt": GPTConfig(vocab_size=64, context_length=16, layers=2, hidden=64, heads=8, kv_heads=4,
                                 positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False)}
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


def expected_terms(name, N, split, dtype=torch.float32):
    return split_block_terms(EVEN[name], B, T, N, dtype, by_tokens=split == "sequence").values()


def expected_bytes(name, N, split):
    return sum(expected_terms(name, N, split, torch.float64))


@pytest.mark.parametrize("N", WORLDS)
@BOTH
@pytest.mark.parametrize("name", EVEN)
def test_activations_traffic_and_weights_of_a_block_are_those_of_the_closed_forms(name, split, N):
    block = GPT(EVEN[name]).blocks[0]
    cut = sum(p.numel() for key, p in block.named_parameters() if p.dim() == 2 or key.endswith(("qkv.bias", "up.bias")))
    rest = sum(p.numel() for p in block.parameters()) - cut
    for rank in launch(kept, N, name, split):
        assert rank[0] == expected_bytes(name, N, split)
        assert rank[1] == block_traffic(EVEN[name], B, T, N, 8, by_tokens=split == "sequence")
        assert rank[2] == 8 * (cut // N + rest)


def test_a_version_that_splits_nothing_fails_these():
    for rank in launch(kept, 2, "gpt", "tensor", "whole"):
        assert rank[0] == expected_bytes("gpt", 1, "tensor") > expected_bytes("gpt", 2, "tensor")
        assert rank[1].total == 0


def test_a_version_that_keeps_what_it_gathered_fails_these():
    for rank in launch(kept, 2, "gpt", "sequence", "gathered"):
        assert rank[0] > expected_bytes("gpt", 2, "sequence")


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
    blocks, last = [EVEN["gpt"].layers * sum(expected_terms("gpt", N, split)) for split in SPLITS], B * T * (64 * 4 + 8)
    saved = kept_by_forward(N, "tensor") - kept_by_forward(N, "sequence")
    assert saved == blocks[0] - blocks[1] + last - last // N


@pytest.mark.parametrize("tied", [False, True])
def test_splitting_takes_no_more_than_the_model_and_a_layer(tied):
    model = GPT(GPTConfig(**{**vars(EVEN["gpt"]), "layers": 8, "tied": tied}))
    before, largest = sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters())
    with memory.track(model) as t:
        tensor_parallel(model, FakeCommunicator(0, 4))
        gc.collect()
    assert t.peak.total <= before + 2 * largest
    assert t.now.total == sum(p.nbytes for p in model.parameters()) < 0.4 * before


# --- random numbers --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention that gives the mask of its dropout away."""

    def forward(self, q, k, v, dropout_p=0.0, causal=False):
        self.seen = nn.functional.dropout(torch.ones(64), dropout_p)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def masks(comm, split):
    torch.manual_seed(0)
    attention, seen = Masked(), []
    model = GPT(GPTConfig(**{**vars(EVEN["gpt"]), "dropout": 0.5}), attention=attention)
    SPLITS[split](model, comm)
    bodies(model)[0].dropout.register_forward_hook(lambda module, args, output: seen.append(output != 0))
    tokens = tokens_of(model, B, T)
    loss_of(model, tokens).backward()
    return attention.seen, seen[0], torch.get_rng_state()


@BOTH
def test_random_numbers_differ_within_the_split_part_and_agree_outside(split):
    (inside, outside, state), (others_inside, others_outside, others_state) = launch(masks, 2, split)
    assert not torch.equal(inside, others_inside) and torch.equal(state, others_state)
    assert torch.equal(outside, others_outside) == (split == "tensor")


# --- loss on split logits --------------------------------------------------------------------------------------------


def losses(comm, name):
    model = whole(name)
    reference, tokens = copy.deepcopy(model), tokens_of(model)
    tensor_parallel(model, comm, loss_parallel=True)
    return [loss.item() for loss in (model(input_ids=tokens, labels=tokens).loss, loss_of(reference, tokens))], tuple(
        model(input_ids=tokens).logits.shape)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_labels_can_be_scored_on_logits_that_stay_split(name):
    for rank, (both, shape) in enumerate(launch(losses, 2, name)):
        assert both[0] == pytest.approx(both[1], rel=1e-6)
        assert shape[-1] == (V // 2, V - V // 2)[rank]


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(comm, make, plan=None):
    with pytest.raises((ValueError, TypeError)) as error:
        tensor_parallel(make(), comm, plan)
    return str(error.value)


def three_heads():
    return GPT(GPTConfig(vocab_size=8, context_length=8, layers=1, hidden=6, heads=3))


@pytest.mark.parametrize(("make", "plan", "text"), [
    (three_heads, None, "blocks.0.attention.qkv: 3 heads on 2 ranks"),
    (three_heads, {"block.*.mlp.up": "column"}, "'block.*.mlp.up' matches no module"),
    (three_heads, {"blocks.*.mlp.up": "columns"}, "style 'columns': expected one of column, row"),
    (three_heads, {"blocks.*.norm1": "column"}, "LayerNorm: expected an nn.Linear"),
    (three_heads, {"head": "head"}, "embedding and head share a weight"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), None, "no plan is known for Sequential"),
])
def test_what_cannot_be_split_is_refused_by_name(make, plan, text):
    for message in launch(refused, 2, make, plan):
        assert text in message


def other_models(comm):
    torch.manual_seed(0)
    tensor_parallel(GPT(EVEN["gpt"] if comm.rank else EVEN["grouped gpt"]), comm)


def test_other_models_on_other_ranks_are_named():
    with pytest.raises(RankError, match="another model than rank 0") as error:
        launch(other_models, 2)
    assert CollectiveMismatch.__name__ in str(error.value)


def other_values(comm):
    torch.manual_seed(comm.rank)
    model = GPT(EVEN["gpt"])
    mine = copy.deepcopy(model)
    tensor_parallel(model, comm)
    return [(p.shard_spec, p.detach()) for p in model.parameters()], dict(mine.named_parameters())


def test_every_rank_gets_its_part_of_rank_0s_values():
    ranks = launch(other_values, 2)
    wanted = ranks[0][1]
    for parts, _ in ranks:
        for spec, value in parts:
            assert torch.equal(value, block_of(wanted[spec.name], spec))


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
    for y, dx, none in launch(an_mlp, N, None, frozen):
        assert max(y, dx) <= 1e-12 and none == frozen


def test_each_part_of_a_fused_layer_is_cut_by_itself():
    assert launch(an_mlp, 2, (4, 6), False) == [5, 5]


# --- together with others --------------------------------------------------------------------------------------------


def under_autocast(comm, split, kind):
    model = whole("gpt", torch.float32)
    reference, tokens = copy.deepcopy(model), tokens_of(model)
    SPLITS[split](model, comm)
    context = torch.autocast("cpu", torch.bfloat16) if kind == "torch" else autocast(torch.bfloat16)
    found = []
    for each in (reference, model):
        with context:
            loss = loss_of(each, tokens)
        loss.backward()
        found.append(loss.item())
    gradients = dict(reference.named_parameters())
    far = max(((p.grad - block_of(whole, p.shard_spec)).norm() / whole.norm()).item()
              for p in model.parameters() for whole in [gradients[p.shard_spec.name].grad])
    return found, far, {p.grad.dtype for p in model.parameters()}


@pytest.mark.parametrize("kind", ["torch", "ours"])
@BOTH
def test_under_autocast(split, kind):
    for (theirs, ours), far, dtypes in launch(under_autocast, 2, split, kind):
        assert ours == pytest.approx(theirs, rel=0.01) and far < 0.1 and dtypes == {torch.float32}


def unfrozen(comm, split):
    model = whole("gpt")
    reference, tokens = copy.deepcopy(model), tokens_of(model)
    for each in (model, reference):
        for key, p in each.named_parameters():
            p.requires_grad_("norm" not in key and "bias" not in key)
    SPLITS[split](model, comm)
    for each in (model, reference):
        loss_of(each, tokens).backward()
        each.zero_grad()
        each.requires_grad_(True)
        loss_of(each, tokens).backward()
    gradients = dict(reference.named_parameters())
    return max((p.grad - block_of(gradients[p.shard_spec.name].grad, p.shard_spec)).abs().max().item()
               for p in model.parameters())


@BOTH
def test_weights_that_are_trained_later(split):
    assert max(launch(unfrozen, 2, split)) <= 1e-12


def other_inputs(comm):
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
    return [(a - b).abs().max().item() for a, b in zip(wanted, (x.grad, y.grad), strict=True)], split[0].siblings.apart


def test_siblings_may_read_something_else():
    """As in attention from a decoder to an encoder."""
    for far, apart in launch(other_inputs, 2):
        assert max(far) <= 1e-12 and apart


@BOTH
def test_one_rank_alone_reads_the_bytes_of_rank_0_of_many(split):
    peak, whole_peak = (step_peak(FakeCommunicator(0, N), split) for N in (4, 1))
    assert launch(step_peak, 4, split)[0] == peak
    assert peak.total < 0.8 * whole_peak.total


def step_peak(comm, split):
    model = SPLITS[split](GPT(EVEN["gpt"]), comm)
    tokens = torch.zeros(B, T, dtype=torch.int64)
    with memory.track(model, tokens) as t:
        model(tokens, tokens).backward()
    return t.peak
