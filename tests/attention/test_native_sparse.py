"""Native sparse attention is its definition, causal for each query, linear in bytes, and its paper's."""

import math

import attention_kit as kit
import pytest
import torch
from one_screen import check_paper
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention import causal_mask, reference_attention
from refimpl.attention import native_sparse as hardened
from refimpl.attention.masks import BlockMask
from refimpl.attention.native_sparse import (
    NativeSparseAttention,
    compressed_mask,
    native_sparse_bytes,
    native_sparse_flops,
    window_mask,
)
from refimpl.attention.own_layers import in_each_layer
from refimpl.attention.selected_masks import apart
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig
from refimpl.papers import native_sparse as paper


def made(D=8, block=32, top_k=4, window=20, dtype=torch.float64, seed=0):
    """An attention whose parameters are not those that it begins with."""
    module = NativeSparseAttention(D, block=block, top_k=top_k, window=window, kernel="tiled").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype), alpha=0.3)
    return module


def attend(q, k, v, seen):
    """Softmax over the pairs that are seen, and 0 of a query that sees none; the weights, too."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return weights @ v, weights


def picks(weights, G, T, block, top_k):
    """The blocks of each query, as a loop says it: booleans (B, G, T, blocks)."""
    picked = torch.zeros(len(weights), G, T, -(-T // block), dtype=torch.bool)
    for its, worth in zip(picked.flatten(0, 1), weights.unflatten(1, (G, -1)).sum(2).flatten(0, 1), strict=True):
        for t, ranked in enumerate(worth.argsort(-1, descending=True).tolist()):
            own = t // block
            always = {0, own, max(own - 1, 0)}
            others = [c for c in ranked if c < own and c not in always]
            its[t, [*always, *others[: top_k - len(always)]]] = True
    return picked


def definition(module, q, k, v):
    """All three branches with whole matrices, and the blocks that were picked."""
    (_, H, T, _), G, block = q.shape, k.shape[1], module.block
    C = T // block
    short = [phi(torch.cat([x[:, :, c * block : (c + 1) * block].flatten(2).unsqueeze(2) for c in range(C)], 2))
             for x, phi in ((k, module.phi_k), (v, module.phi_v))]
    k, v, short_k, short_v = (x.repeat_interleave(H // G, 1) for x in (k, v, *short))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    compressed, weights = attend(q, short_k, short_v, torch.arange(C) < i // block)
    picked = picks(weights.detach(), G, T, block, module.top_k)
    its = picked.repeat_interleave(block, 3)[..., :T].repeat_interleave(H // G, 1)
    outs = compressed, attend(q, k, v, its & (j <= i))[0], attend(q, k, v, (j <= i) & (i - j <= module.window))[0]
    gates = module.gates(q).sigmoid().unbind(-1)
    return sum(gate[..., None] * out for gate, out in zip(gates, outs, strict=True)), picked


def all_gradients(attention, module, q, k, v, gradient):
    out = attention(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v, *module.parameters()), gradient)


def choice(module, q, k):
    return module.select(q, module.compressed(k, module.phi_k))


# (B, H, G, T, block, top_k): a group of several heads, of one, and one group; a last block that is cut
SHAPES = [(2, 4, 2, 200, 32, 4), (1, 3, 3, 193, 32, 5), (2, 4, 1, 192, 32, 4), (1, 2, 1, 330, 64, 4)]


@pytest.mark.parametrize(("B", "H", "G", "T", "block", "top_k"), SHAPES)
def test_it_is_the_definition(B, H, G, T, block, top_k):
    module, given = made(block=block, top_k=top_k), kit.inputs(B, H, G, T, T, 8, torch.float64)
    wanted = all_gradients(lambda q, k, v: definition(module, q, k, v)[0], module, *given)
    for x, y in zip(all_gradients(module, module, *given), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_differences():
    module, given = made(D=2), kit.inputs(1, 2, 1, 165, 165, 2, torch.float64)[:3]
    parameters = dict(module.named_parameters())

    def call(*values):
        return torch.func.functional_call(module, dict(zip(parameters, values[3:], strict=True)), values[:3])

    torch.autograd.gradcheck(call, (*given, *(p.detach().requires_grad_() for p in parameters.values())),
                             fast_mode=True)


@pytest.mark.parametrize(("B", "H", "G", "T", "block", "top_k"), SHAPES)
def test_the_choice_is_each_querys_own_and_its_lists_are_those_of_the_predicate(B, H, G, T, block, top_k):
    module, (q, k, v, _) = made(block=block, top_k=top_k), kit.inputs(B, H, G, T, T, 8, torch.float64)
    mask = choice(module, q, k)
    assert mask.shape[:2] == (B, H if G > 1 else 1)
    picked = definition(module, q, k, v)[1].repeat_interleave(mask.shape[1] // G, 1)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    assert torch.equal(mask.dense(), picked.repeat_interleave(block, 3)[..., :T] & (j <= i))
    assert (picked[0, 0, -block:] != picked[0, 0, -1]).any(), "queries of a block pick differently"
    asked = BlockMask.of(mask.sees, T, batch=B, heads=mask.shape[1], block=block)
    assert torch.equal(asked.kinds(), mask.kinds()) and (asked.pairs, asked.nbytes) == (mask.pairs, mask.nbytes)


def test_no_output_depends_on_a_later_token():
    module, (q, k, v, _) = made(dtype=torch.float32), kit.inputs(1, 4, 2, 300, 300, 8)
    with torch.no_grad():
        before = module(q, k, v)
        for t in (31, 32, 170, 299):  # the end of a block, its first token, one inside, the last
            others = [torch.cat([x[:, :, :t], 5 * torch.randn_like(x[:, :, t:])], 2) for x in (q, k, v)]
            assert torch.equal(module(*others)[:, :, :t], before[:, :, :t])
            assert not torch.equal(module(*others)[:, :, t], before[:, :, t])


def test_a_choice_that_a_block_shares_would_know_later_queries(monkeypatch):
    """The mutant: each query picks what the sum over its block ranks first."""
    own = torch.Tensor.topk

    def shared(worth, k):
        rows = worth.unflatten(2, (-1, 32))
        return own(rows.clamp(min=0).sum(3, keepdim=True).expand(rows.shape).flatten(2, 3), k)

    monkeypatch.setattr(torch.Tensor, "topk", shared)
    module, (q, k, v, _) = made(dtype=torch.float32), kit.inputs(1, 2, 1, 256, 256, 8)
    with torch.no_grad():
        later = torch.cat([q[:, :, :250], 20 * torch.randn_like(q[:, :, 250:])], 2)
        assert not torch.allclose(module(later, k, v)[:, :, :250], module(q, k, v)[:, :, :250])


def test_all_blocks_selected_are_causal_attention():
    module, (q, k, v, _) = made(top_k=7), kit.inputs(2, 4, 2, 200, 200, 8, torch.float64)
    assert torch.equal(choice(module, q, k).dense(), causal_mask(200, block=32).dense().expand(2, 4, -1, -1))
    with torch.no_grad():
        module.gates.weight.zero_()
        module.gates.bias.copy_(torch.tensor([-1000.0, 1000.0, -1000.0]))  # the selected branch alone
        torch.testing.assert_close(module(q, k, v), reference_attention(q, k, v, causal=True))


def test_a_query_finds_the_block_of_the_key_that_it_is_like():
    """A choice that ignores the scores would not."""
    module = NativeSparseAttention(16, block=32, top_k=4, window=0)
    generator = torch.Generator().manual_seed(0)
    k, q = torch.randn(1, 1, 512, 16, generator=generator) * 0.1, torch.randn(1, 2, 512, 16, generator=generator) * 0.1
    for at, place in ((300, 70), (301, 200), (511, 140)):
        k[0, 0, place] = q[0, :, at] = 8 * torch.randn(16, generator=generator)
        seen = choice(module, q, k).dense()[0, 0, at]
        assert seen[place], (at, place)
    assert not choice(module, q, k).dense()[0, 0, 300, 200], "of the query beside it"


# --- masks of picks --------------------------------------------------------------------------------------------------


def test_picks_by_which_no_two_queries_of_a_block_agree():
    T, block, top_k = 1024, 32, 5
    mask, own = apart((1, 1, T, top_k), 1, block), torch.arange(T // block)
    assert [len(each) for each in mask.listed] == (own + 1).clamp(max=3 + block * (top_k - 3)).tolist()
    assert (mask.dense()[..., block - 1 :: block].sum((0, 1, 3)) <= top_k).all(), "blocks that a query picks whole"


def test_the_mask_of_compressed_keys_is_asked_at_its_edges_alone():
    for T, block in ((1000, 64), (8200, 32)):
        mask = compressed_mask(T, block)
        assert torch.equal(mask.dense()[0, 0], torch.arange(T // block) < torch.arange(T)[:, None] // block)
    assert (mask.kinds() == 2).any() and (mask.kinds() == 1).sum(-1).max() == 1


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


def test_flops_are_those_of_listed_blocks():
    module, (q, k, v, gradient) = made(16, dtype=torch.float32), kit.inputs(2, 4, 2, 600, 600, 16)
    form = native_sparse_flops(q.shape, k.shape, choice(module, q, k), 20)
    with FlopCounterMode(display=False) as counter:
        out = module(q, k, v)
        forward = counter.get_total_flops()
        out.backward(gradient)
    assert (forward, counter.get_total_flops() - forward) == (form.forward, form.backward_recomputing)


def read(module, q, k, v, gradient):
    """(kept, peak) bytes above the inputs, the parameters and the masks; and the choice's mask."""
    masks, own = [], module.select
    module.select = lambda *given: masks.append(own(*given)) or masks[-1]
    T = q.shape[2]
    fixed = [window_mask(T, module.window).words, compressed_mask(T, module.block).words]
    with memory.track(module, q, k, v, gradient, *fixed) as tracked:
        before = tracked.now.total
        out = module(q, k, v)
        kept = tracked.now.total - before
        torch.autograd.grad(out, (q, k, v, *module.parameters()), gradient)
    module.select = own
    words = sum(mask.words.nbytes for mask in masks)  # which the tracker sees, since the form in PyTorch reads them
    return kept - words, tracked.peak.total - before - words, masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("B", "H", "G", "T", "D", "block", "top_k"), [
    (1, 2, 1, 1024, 32, 32, 6), (2, 4, 2, 512, 64, 32, 5), (2, 2, 2, 800, 32, 64, 5)])
def test_bytes_are_the_closed_form(B, H, G, T, D, block, top_k, dtype):
    module, given = made(D, block, top_k, 100, dtype), kit.inputs(B, H, G, T, T, D, dtype)
    kept, peak, [mask] = read(module, *given)
    form = native_sparse_bytes(given[0].shape, given[1].shape, mask, 100, dtype, kernels=False)
    assert (kept, peak) == form


def test_whole_matrices_take_more_than_the_closed_form():
    """The mutant: right values, and T × T weights of the selected branch."""
    module, given = made(32, dtype=torch.float32), kit.inputs(1, 2, 1, 1024, 1024, 32)

    def whole(q, k, v, mask, kernel):
        seen = mask.dense().expand(*q.shape[:3], -1)
        return attend(q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), seen)[0]

    own = read(module, *given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardened, "block_sparse_attention", whole)
        torch.testing.assert_close(module(*given[:3]), made(32, dtype=torch.float32)(*given[:3]))
        kept, peak, [mask] = read(module, *given)
    form = native_sparse_bytes(given[0].shape, given[1].shape, mask, 20, kernels=False)
    assert own[0] == form.kept and kept > 3 * form.kept and peak > 3 * form.peak


def dry_step(T, top_k, block, window=512):
    """A step by the kernels' form, whose lists are on the device, too: the choice's mask, and the bytes given."""
    module = NativeSparseAttention(64, block=block, top_k=top_k, window=window, kernel="triton")
    q, k, v, gradient = (torch.empty(1, (2, 1, 1, 2)[n], T, 64, requires_grad=n < 3) for n in range(4))
    masks, own = [], module.select
    module.select = lambda *given: masks.append(own(*given)) or masks[-1]
    torch.autograd.grad(module(q, k, v), (q, k, v, *module.parameters()), gradient)
    return masks[0], sum(x.nbytes for x in (q, k, v, gradient, *module.parameters()))


@pytest.mark.parametrize(("T", "top_k", "block"), [(2**14, 8, 32), pytest.param(
    2**20, 16, 64, marks=pytest.mark.nightly)])
def test_bytes_of_a_million_tokens_are_linear(T, top_k, block):
    dry = memory.dry_run(dry_step, T, top_k, block)
    mask, given = dry.result
    form = native_sparse_bytes((1, 2, T, 64), (1, 1, T, 64), mask, 512)
    lists = mask.nbytes + window_mask(T, 512).nbytes + compressed_mask(T, block).nbytes
    assert dry.peak.total - given == form.peak + lists
    assert form.peak < 36 * 2 * T * 64, "nine times q, whatever the length"


# --- in a model, and bad input ---------------------------------------------------------------------------------------


def test_a_model_learns_real_text_and_each_layer_has_its_own_parameters():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, hidden=32, layers=2, heads=4, kv_heads=2, context_length=128,
                          positions="rotary"))
    count = sum(p.numel() for p in model.parameters())
    in_each_layer(model, lambda: made(8, dtype=torch.float32))
    own = [p for name, p in model.named_parameters() if "phi" in name or "gates" in name]
    assert len(own) == 12 and sum(p.numel() for p in model.parameters()) == count + sum(p.numel() for p in own)
    begun, losses = [p.detach().clone() for p in own], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _, (tokens, targets) in zip(range(20), TextData().batches(4, 128, epochs=None), strict=False):
        optimizer.zero_grad()
        losses.append(model(tokens, targets))
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert not any(torch.equal(p, before) for p, before in zip(own, begun, strict=True))


def test_layers_of_their_own_have_the_models_dtype_and_need_a_layer_of_ours():
    model = GPT(GPTConfig(vocab_size=9, hidden=16, layers=2, heads=2, context_length=128), dtype=torch.bfloat16)
    in_each_layer(model, lambda: made(8, top_k=3, dtype=torch.float32))
    assert model(torch.zeros(1, 100, dtype=torch.int64)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="Linear has no refimpl.model.Attention"):
        in_each_layer(torch.nn.Linear(2, 2), lambda: NativeSparseAttention(8))


def test_under_autocast_the_choice_is_made_in_fp32():
    module, (q, k, v, _) = made(dtype=torch.float32), kit.inputs(1, 2, 1, 200, 200, 8, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k, v)
    wanted = definition(made(), *(x.double() for x in (q, k, v)))[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"top_k": 2}, ValueError, "top_k=2: expected at least 3"), ({"top_k": 4.0}, TypeError, "top_k=4.0: expected an"),
    ({"block": 48}, ValueError, "block=48: expected one of 32, 64"), ({"window": -1}, ValueError, "window=-1"),
    ({"head_dim": 0}, ValueError, "head_dim=0: expected at least 1")])
def test_sizes_that_are_none_are_named(options, error, words):
    with pytest.raises(error, match=words):
        NativeSparseAttention(**{"head_dim": 8, **options})


@pytest.mark.parametrize(("shapes", "causal", "words"), [
    ((200, 200, 8, 8), False, "causal=False: expected True, a query picks among blocks that ended"),
    ((200, 210, 8, 8), True, "200 queries with 210 keys: expected as many"),
    ((200, 200, 4, 8), True, "head_dims of q and v 4 and 8: expected 8"),
    ((200, 200, 8, 4), True, "head_dims of q and v 8 and 4: expected 8"),
    ((96, 96, 8, 8), True, "top_k=4 blocks of 32 with 96 tokens, 3 blocks: expected a selection that is no larger")])
def test_a_call_that_does_not_fit_is_named(shapes, causal, words):
    (T, S, D, V), zeros = shapes, torch.zeros
    with pytest.raises(ValueError, match=words):
        made(dtype=torch.float32)(zeros(1, 2, T, D), zeros(1, 2, S, D), zeros(1, 2, S, V), causal=causal)


# --- the paper in code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("G", "M"), [(2, 2), (1, 3), (3, 1)])
def test_the_paper_is_the_hardened_version(G, M):
    torch.manual_seed(0)
    module = made(16, paper.N, paper.K, paper.W)
    theirs = paper.NativeSparse(16).double()
    theirs.load_state_dict(module.state_dict())
    q = torch.randn(2, G, M, 512, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, G, 512, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, wanted = theirs(q, k, v), module(q.flatten(1, 2), k, v).unflatten(1, (G, M))
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found)
    for x, y in zip(*(torch.autograd.grad(out, (q, k, v, *each.parameters()), gradient) for out, each in (
            (found, theirs), (wanted, module))), strict=True):
        torch.testing.assert_close(x, y)


def test_the_papers_bytes_are_linear():
    peaks = []
    for T in (512, 1024):
        module = paper.NativeSparse(16)
        q, k, v = torch.randn(1, 1, 2, T, 16), torch.randn(1, 1, T, 16), torch.randn(1, 1, T, 16)
        with memory.track(module, q, k, v) as tracked:
            module(*(x.requires_grad_() for x in (q, k, v))).sum().backward()
        peaks.append(tracked.peak.total - tracked.start.total)
    assert peaks[1] < 2 * peaks[0]


def test_one_screen():
    check_paper("attention", "native_sparse")
