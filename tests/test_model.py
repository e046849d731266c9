"""The GPT: its size in closed form, its logits against torch's own parts, its promises, and what it refuses."""

import copy
import functools
import math
from dataclasses import replace
from itertools import islice

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from refimpl import catalog, memory
from refimpl.data import TextData
from refimpl.model import GPT, Attention, GPTConfig, rotate, rotation_table, softmax_attention

SIZES = {"vocab_size": 61, "context_length": 32, "layers": 2, "hidden": 48, "heads": 4}
GPT2 = GPTConfig(**SIZES)
LLAMA, NEOX = replace(GPT2, **families.LLAMA, mlp_hidden=88), replace(GPT2, **families.NEOX | {"rotary_fraction": 0.5})
FAMILIES = {
    "gpt2": GPT2, "llama": LLAMA, "neox": NEOX,
    "gpt2 without biases, one key head": replace(GPT2, bias=False, kv_heads=1),
    "rmsnorm with biases, another eps and base": replace(LLAMA, bias=True, norm_eps=0.1, rotary_base=100.0),
    "learned positions, swiglu, untied": replace(GPT2, activation="swiglu", tied=False, norm_eps=0.1),
    "gemma 2: heads wider than hidden, geglu, norms after": replace(
        LLAMA, head_dim=20, activation="geglu", post_norms=True, tied=True),
    "qwen 2: a bias of q, k and v alone": replace(LLAMA, qkv_bias=True),
    "layernorms after both branches of a parallel residual": replace(NEOX, post_norms=True, head_dim=8)}
STAGED = {**FAMILIES, "neox, tied": replace(NEOX, tied=True)}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 60], [0, 3, 5, 8, 9, 7, 9, 3]])


def lively(config, attention=softmax_attention, dtype=torch.float64):
    """A GPT whose every parameter matters: fresh from __init__, gains are 1, biases 0 and logits near 0."""
    model, generator = GPT(config, attention, dtype=dtype).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({
    "vocab_size": st.integers(1, 50), "context_length": st.integers(1, 20), "layers": st.integers(1, 3),
    "heads_and_groups": st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3), (6, 1)]),
    "size": st.sampled_from([2, 4, 8]), "head_dim": st.sampled_from([None, 6]),
    "mlp_hidden": st.sampled_from([None, 1, 13]), "norm": st.sampled_from(["layernorm", "rmsnorm"]),
    "activation": st.sampled_from(["gelu", "swiglu", "geglu"]), "positions": st.sampled_from(["learned", "rotary"]),
    "qkv_bias": st.booleans(), "post_norms": st.booleans(), "bias": st.booleans(), "tied": st.booleans(),
    "parallel_residual": st.booleans()}))
def test_the_closed_form_counts_every_parameter_of_every_family(fields):
    heads, groups = fields.pop("heads_and_groups")
    config = GPTConfig(hidden=heads * fields.pop("size"), heads=heads, kv_heads=groups, **fields)
    assert config.parameter_count() == sum(p.numel() for p in GPT(config).parameters())


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_published_model_has_its_published_size(name):
    config = GPTConfig.named(name)
    assert config.parameter_count() == sum(p.numel() for p in GPT(config, device="meta").parameters())
    assert config.parameter_count() == (catalog.published_parameters(name) or config.parameter_count())


def test_the_counts_that_the_papers_are_known_by():
    known = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama2-7b": 6_738_415_616, "llama-65b": 65_285_660_672}
    assert {name: GPTConfig.named(name).parameter_count() for name in known} == known


def test_a_named_model_can_be_changed():
    config = GPTConfig.named("gpt2", layers=1, dropout=0.1)
    assert (config.layers, config.dropout, config.hidden) == (1, 0.1, 768)
    with pytest.raises(ValueError, match="llama-7b"):
        GPTConfig.named("llama-7")


# --- logits, against torch's own parts -------------------------------------------------------------------------------

def reference_logits(model, tokens_BT, offset=0):
    """The same function of the same parameters, written apart: complex rotary, explicit norms, torch's attention."""
    p, c = dict(model.named_parameters()), model.config
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    def linear(x, name):
        return torch.einsum("btc,dc->btd", x, p[f"{name}.weight"]) + p.get(f"{name}.bias", 0)

    def norm(x, name):
        if c.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return x * p[f"{name}.weight"] + p.get(f"{name}.bias", 0)

    def turn(x_BHTD):
        n = int(c.head_dim * c.rotary_fraction)
        position = torch.arange(offset, offset + x_BHTD.shape[2], dtype=torch.float64)
        angle = position[:, None] * c.rotary_base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        z = torch.complex(x_BHTD[..., : n // 2], x_BHTD[..., n // 2 : n]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, x_BHTD[..., n:]], dim=-1)

    def attention(x, name):
        sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (y.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for y in linear(x, f"{name}.qkv").split(sizes, -1))
        if c.positions == "rotary":
            q, k = turn(q), turn(k)
        return linear(sdpa(q, k, v).transpose(1, 2).flatten(2), f"{name}.out")

    def mlp(x, name):
        up = linear(x, f"{name}.up")
        if c.activation == "swiglu":
            gate = linear(x, f"{name}.gate")
            return linear(gate * torch.sigmoid(gate) * up, f"{name}.down")
        x = linear(x, f"{name}.gate") if c.activation == "geglu" else up
        gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return linear(gelu * up if c.activation == "geglu" else gelu, f"{name}.down")

    def after(x, name):
        return norm(x, name) if c.post_norms else x

    x = p["embedding.weight"][tokens_BT]
    if c.positions == "learned":
        x = x + p["positions.weight"][offset : offset + tokens_BT.shape[1]]
    for i in range(c.layers):
        name = f"blocks.{i}"
        attended = x + after(attention(norm(x, f"{name}.norm1"), f"{name}.attention"), f"{name}.post1")
        read = norm(x if c.parallel_residual else attended, f"{name}.norm2")
        x = attended + after(mlp(read, f"{name}.mlp"), f"{name}.post2")
    return norm(x, "norm") @ p["embedding.weight" if c.tied else "head.weight"].T


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("offset", [0, 5])
def test_logits_are_those_of_the_written_out_model(name, offset):
    model = lively(FAMILIES[name])
    logits_BTV = model(TOKENS, offset=offset)
    assert logits_BTV.shape == (2, 8, 61) and logits_BTV.std() > 0.1
    torch.testing.assert_close(logits_BTV, reference_logits(model, TOKENS, offset), rtol=1e-5, atol=1e-5)


def test_attention_is_torchs_multihead_attention():
    ours = Attention(GPT2, softmax_attention).double()
    theirs = nn.MultiheadAttention(48, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x_BTC = torch.randn(2, 9, 48, dtype=torch.float64)
    masked_TT = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    torch.testing.assert_close(ours(x_BTC), theirs(x_BTC, x_BTC, x_BTC, attn_mask=masked_TT, need_weights=False)[0])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_attention_is_torchs_with_grouped_heads(groups, causal):
    q, k, v = (torch.randn(2, heads, 7, 6, dtype=torch.float64) for heads in (4, groups, groups))
    torch.testing.assert_close(softmax_attention(q, k, v, causal=causal),
                               F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))


def test_fewer_queries_than_keys_are_the_last_ones():
    q, k, v = (torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
    whole = softmax_attention(q, k, v, causal=True)
    torch.testing.assert_close(softmax_attention(q[:, :, 6:], k, v, causal=True), whole[:, :, 6:])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_attention_are_right(groups, causal):
    q, k, v = (torch.randn(2, heads, 3, 2, dtype=torch.float64, requires_grad=True) for heads in (4, groups, groups))
    assert torch.autograd.gradcheck(functools.partial(softmax_attention, causal=causal), (q, k, v))


def test_attention_drops_weights_and_keeps_their_mean():
    q_BHTD, v_BHSD = torch.zeros(4, 8, 50, 50), torch.eye(50).expand(4, 8, 50, 50)
    weights = softmax_attention(q_BHTD, q_BHTD, v_BHSD, dropout_p=0.25)  # all were 1/50
    kept = weights > 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 50 / 0.75))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_low_precision_is_near(name):
    model, low = (GPT(FAMILIES[name], dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16))
    low.load_state_dict(model.state_dict())
    assert {low(TOKENS).dtype, *(p.dtype for p in low.parameters())} == {torch.bfloat16}
    assert low(TOKENS, TOKENS).dtype == torch.float32
    torch.testing.assert_close(low(TOKENS).float(), model(TOKENS), rtol=0.1, atol=0.03)


# --- positions -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FAMILIES)
def test_later_tokens_do_not_change_earlier_logits(name):
    model, changed = lively(FAMILIES[name]), TOKENS.clone()
    changed[:, 5] = 20
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert all((before[:, t] - after[:, t]).abs().max() > 1e-3 for t in (5, 6, 7))


def spying(calls):
    """Softmax attention that keeps what it was called with."""
    def attention(*qkv, **options):
        calls.append((qkv, options))
        return softmax_attention(*qkv, **options)
    return attention


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_a_sequence_with_an_offset_is_the_same_positions_of_the_whole(name):
    """The first block's q, k, v depend on a token and its position alone."""
    calls = []
    model = lively(FAMILIES[name], spying(calls))
    for tokens, offset in ((TOKENS, 0), (TOKENS[:, 3:], 3), (TOKENS[:, 3:], 0)):
        model(tokens, offset=offset)
    (whole, _), (chunk, _), (elsewhere, _) = calls[:: FAMILIES[name].layers]
    torch.testing.assert_close([x[:, :, 3:] for x in whole], list(chunk))
    assert (whole[1][:, :, 3:] - elsewhere[1]).abs().max() > 0.01


def test_under_autocast_rotary_attention_is_given_one_dtype():
    seen = []
    def attention(q_BHTD, k_BGSD, v_BGSD):
        seen.append({q_BHTD.dtype, k_BGSD.dtype, v_BGSD.dtype})
        return q_BHTD

    with torch.autocast("cpu", torch.bfloat16):
        GPT(LLAMA, attention)(torch.randint(0, LLAMA.vocab_size, (1, 8)))
    assert seen == LLAMA.layers * [{torch.bfloat16}]


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_rotary_attention_knows_relative_positions_only(name):
    model = lively(FAMILIES[name])
    torch.testing.assert_close(model(TOKENS, offset=20), model(TOKENS), rtol=1e-4, atol=1e-4)  # the tables are fp32
    swapped = model(TOKENS[:, [1, 0, *range(2, 8)]])
    assert (swapped - model(TOKENS))[:, 2:].abs().max() > 1e-3


def test_rotation_turns_pairs_and_keeps_their_length():
    cos, sin = rotation_table(replace(LLAMA, context_length=32))
    x = torch.randn(1, 1, 32, 12)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(turned[..., :6] ** 2 + turned[..., 6:] ** 2, x[..., :6] ** 2 + x[..., 6:] ** 2)
    partly = rotate(x, *rotation_table(NEOX))
    assert torch.equal(partly[..., 6:], x[..., 6:]) and not torch.equal(partly[..., :6], x[..., :6])


# --- loss, initialisation, training ----------------------------------------------------------------------------------

def test_the_loss_is_the_mean_cross_entropy_of_what_counts():
    model, targets = lively(GPT2), TOKENS.roll(-1, 1)
    targets[:, -1] = targets[0, 2] = -100
    log_p = reference_logits(model, TOKENS).log_softmax(-1)
    expected = -sum(log_p[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0) / 13
    torch.testing.assert_close(model(TOKENS, targets).double(), expected, rtol=1e-4, atol=1e-5)


def test_int32_tokens_do_as_well():
    model = lively(GPT2)
    assert torch.equal(model(TOKENS.int()), model(TOKENS))
    assert torch.equal(model(TOKENS.int(), TOKENS.int()), model(TOKENS, TOKENS))


@pytest.mark.parametrize("family", [GPT2, LLAMA])
def test_initialisation_is_gpt2s(family):
    config = replace(family, vocab_size=500, context_length=500, layers=3, hidden=128, heads=4, mlp_hidden=384)
    parameters = dict(GPT(config).named_parameters())
    for name, p in parameters.items():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 3) if into_residual else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name
    assert sum(name.endswith("weight") for name in parameters) == (3 * 6 + 3 if family is GPT2 else 3 * 7 + 3)


def test_tied_embeddings_are_one_parameter():
    tied, untied = GPT(GPT2), GPT(replace(GPT2, tied=False))
    assert tied.head.weight is tied.embedding.weight and untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("family", [GPT2, LLAMA, NEOX])
def test_every_parameter_learns(family):
    model = lively(family)
    model(TOKENS, TOKENS.roll(-1, 1)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("family", [GPT2, LLAMA])
def test_the_loss_falls_on_real_text(family):
    model, text = GPT(replace(family, vocab_size=256, context_length=64)), TextData()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for tokens, targets in islice(text.batches(8, 64), 120):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    frequency = torch.bincount(text.train.int()) / len(text.train)
    without_context = -torch.xlogy(frequency, frequency).sum().item()  # the best that single letters allow: 3.26
    assert sum(losses[-5:]) / 5 < without_context


def test_dropout_is_for_training_alone():
    model, plain = GPT(replace(GPT2, dropout=0.5)), GPT(GPT2)
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model(TOKENS), model(TOKENS))
    torch.testing.assert_close(model.eval()(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("family", [GPT2, NEOX])
def test_dropout_drops_embeddings_attention_and_mlp(family):
    """A dropout that drops (nearly) everything leaves the residual stream zero, if it is applied to all that enters."""
    seen = []
    model = lively(replace(family, dropout=0.999, layers=1), lambda q, k, v, dropout_p: v[:, :1].expand_as(q))
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.train()(TOKENS)
    assert (seen[0] == 0).float().mean() > 0.98


# --- attention given from outside ------------------------------------------------------------------------------------

def test_attention_is_called_with_heads_groups_and_options():
    calls = []
    model = GPT(replace(LLAMA, dropout=0.1), spying(calls))
    model(TOKENS)
    model.eval()(TOKENS)
    assert all([x.shape for x in qkv] == [(2, 4, 8, 12), (2, 2, 8, 12), (2, 2, 8, 12)] for qkv, _ in calls)
    assert [options for _, options in calls] == [{"causal": True, "dropout_p": p} for p in (0.1, 0.1, 0.0, 0.0)]


def plain(q, k, v):
    return softmax_attention(q, k, v, causal=True)


def told_causal_only(q, k, v, causal):
    assert causal is True
    return softmax_attention(q, k, v, causal=causal)


def told_dropout_only(q, k, v, dropout_p=None):
    assert dropout_p == 0.0
    return softmax_attention(q, k, v, causal=True)


def told_anything(q, k, v, **options):
    assert options == {"causal": True, "dropout_p": 0.0}
    return softmax_attention(q, k, v, **options)


class AsModule(nn.Module):
    def forward(self, q, k, v):
        return plain(q, k, v)


@pytest.mark.parametrize("attention", [
    AsModule(), F.scaled_dot_product_attention, plain, told_causal_only, told_dropout_only, told_anything,
    functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
    functools.partial(softmax_attention, causal=True),
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)],
    ids=["module", "torch's", "plain", "causal", "dropout_p", "kwargs", "partial torch's", "partial ours", "lambda"])
def test_any_attention_function_will_do(attention):
    torch.testing.assert_close(lively(LLAMA, attention)(TOKENS), lively(LLAMA)(TOKENS))


def test_what_a_partial_has_settled_stays():
    model, changed = lively(GPT2, functools.partial(softmax_attention, causal=False)), TOKENS.clone()
    changed[:, -1] = 20
    assert not torch.allclose(model(TOKENS)[:, 0], model(changed)[:, 0])


def test_attention_dropout_of_a_partial_is_off_in_eval():
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=0.5)
    model = GPT(replace(GPT2, dropout=0.5), attention)
    assert not torch.equal(model(TOKENS), model(TOKENS)) and torch.equal(model.eval()(TOKENS), model(TOKENS))


def test_dropout_that_the_attention_would_not_do_is_refused():
    with pytest.raises(ValueError, match="dropout=0.1.*takes no dropout_p"):
        GPT(replace(GPT2, dropout=0.1), plain)


# --- in parts: stages of a pipeline, and some of the heads -----------------------------------------------------------

def two_stages(model):
    """Each with a part of the model alone."""
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.blocks, first.norm, first.head = first.blocks[:1], None, None
    last.blocks, last.embedding, last.positions = last.blocks[1:], None, None
    return first, last


def through(blocks, x_BTC, rotation):
    for block in blocks:
        x_BTC = block(x_BTC, rotation)
    return x_BTC


def gradients(*models):
    """By parameter's place in the whole model: the sum of all copies' gradients."""
    found = {}
    for first_block, model in enumerate(models):
        for name, p in model.named_parameters():
            name = name.replace("blocks.0.", f"blocks.{first_block}.")
            if name == "head.weight" and model.config.tied:
                name = "embedding.weight"
            found[name] = found[name] + p.grad if name in found else p.grad
    return found


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("offset", [0, 5])
def test_two_stages_are_the_model_to_the_bit(name, offset):
    model = lively(STAGED[name], dtype=torch.float32)
    first, last = two_stages(model)
    sent = first.embed(TOKENS, offset=offset)
    sent = through(first.blocks, sent, first.rotation(sent, offset=offset))
    received = sent.detach().requires_grad_()
    x, targets = through(last.blocks, received, last.rotation(received, offset=offset)), TOKENS.roll(-1, 1)
    for how in ({}, {"targets_BT": targets, "reduction": "sum"}):
        assert torch.equal(last.predict(x, **how), model(TOKENS, offset=offset, **how))
    loss, expected = last.predict(x, targets), model(TOKENS, targets, offset=offset)
    assert torch.equal(loss, expected)
    loss.backward()
    sent.backward(received.grad)
    expected.backward()
    found, whole = gradients(first, last), gradients(model)
    assert found.keys() == whole.keys() and all(torch.equal(found[each], whole[each]) for each in whole)


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_stage_that_forgets_positions_is_another_model(name):
    model = lively(FAMILIES[name])
    first, last = two_stages(model)
    sent = first.embed(TOKENS, offset=5)
    sent = through(first.blocks, sent, first.rotation(sent, offset=5))
    for rotation in (None, [table.flip(0) for table in last.rotation(sent)]):
        assert (last.predict(through(last.blocks, sent, rotation)) - model(TOKENS, offset=5)).abs().max() > 1e-3


def test_learned_positions_need_no_rotation_and_rotary_ones_are_the_tables():
    x = torch.zeros(2, 8, 48, dtype=torch.bfloat16)
    assert GPT(GPT2).rotation(x) is None
    for mine, table in zip(GPT(LLAMA).rotation(x, offset=3), rotation_table(LLAMA), strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, table[3:11].to(torch.bfloat16))


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_each_part_refuses_by_name(family):
    model, x = GPT(family), torch.zeros(2, 8, 48)
    for part, message in (
        (lambda: model.embed(TOKENS, offset=25), "8 tokens from position 25: the context has 32"),
        (lambda: model.embed(TOKENS.float()), r"tokens of shape \(2, 8\), torch.float32"),
        (lambda: model.embed(with_id(61)), "tokens run from 0 to 61"),
        (lambda: model.rotation(x, offset=25), "8 tokens from position 25: the context has 32"),
        (lambda: model.rotation(x, offset=-1), "8 tokens from position -1"),
        (lambda: model.predict(x, TOKENS[:, :7]), r"targets of shape \(2, 7\) for tokens of \(2, 8\)"),
        (lambda: model.predict(x, TOKENS.float()), r"targets of shape \(2, 8\), torch.float32"),
        (lambda: model.predict(x, with_id(61)), "targets run from 0 to 61")):
        with pytest.raises(ValueError, match=message):
            part()


def heads_of(attention, part, parts):
    """A copy with a part of the heads, as tensor parallelism makes it from outside."""
    c, mine = attention.config, copy.deepcopy(attention).requires_grad_(False)
    sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    for name, x in mine.qkv.named_parameters():
        rows = torch.cat([piece.chunk(parts)[part] for piece in x.split(sizes)])
        setattr(mine.qkv, name, nn.Parameter(rows))
    mine.out.weight = nn.Parameter(mine.out.weight.chunk(parts, 1)[part])
    mine.out.bias = mine.out.bias if part == 0 else None
    return mine


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_parts_of_the_heads_sum_to_all(name, groups):
    heads = []
    def attention(q, k, v):
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        return softmax_attention(q, k, v, causal=True)

    model = lively(replace(FAMILIES[name], kv_heads=groups), attention)
    whole, x = model.blocks[0].attention, torch.randn(2, 8, 48, dtype=torch.float64, requires_grad=True)
    rotation = model.rotation(x)
    expected = whole(x, rotation)
    for parts in (2, groups):
        outputs = [heads_of(whole, part, parts)(x, rotation) for part in range(parts)]
        assert heads[-parts:] == parts * [(4 // parts, groups // parts, groups // parts)]
        both = sum(outputs), expected
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x, retain_graph=True) for y in both))
        assert not torch.allclose(sum(outputs[1:]), expected)


def test_rows_cut_without_regard_to_q_k_and_v_are_other_heads():
    """The mutant: its sizes are right."""
    whole = lively(LLAMA).blocks[0].attention
    x, outputs = torch.randn(2, 8, 48, dtype=torch.float64), []
    for part in range(2):
        mine = heads_of(whole, part, 2)
        mine.qkv.weight.data = whole.qkv.weight.data.chunk(2)[part]
        outputs.append(mine(x))
    assert not torch.allclose(sum(outputs), whole(x))


@pytest.mark.parametrize(("family", "features", "message"), [
    (GPT2, 35, "qkv gives 35 features: expected a multiple of 36, 1 query heads, a key head and a value head of 12"),
    (GPT2, 40, "qkv gives 40 features: expected a multiple of 36"),
    (LLAMA, 72, "qkv gives 72 features: expected a multiple of 48, 2 query heads"),
    (replace(LLAMA, kv_heads=1), 36, "qkv gives 36 features: expected a multiple of 72, 4 query heads"),
    (GPT2, 0, "qkv gives 0 features")])
def test_features_that_are_no_whole_heads_are_refused(family, features, message):
    attention = Attention(family, softmax_attention)
    attention.qkv = nn.Linear(48, 48)
    attention.qkv.weight, attention.qkv.bias = nn.Parameter(torch.zeros(features, 48)), None
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(1, 8, 48))


def test_the_default_dtype_and_device_are_left_as_they_were():
    before = torch.get_default_dtype(), torch.get_default_device()
    model = GPT(LLAMA, dtype=torch.bfloat16, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
    with pytest.raises(RuntimeError), torch.device("meta"):
        GPT(LLAMA, device="nowhere")
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
    with torch.device("meta"):
        assert GPT(GPT2).head.weight.device.type == "meta"


# --- what is refused -------------------------------------------------------------------------------------------------

BAD_CONFIGS = [
    ({"positions": "rotary", "rotary_fraction": 2.0}, "rotary_fraction=2.0"), ({"heads": 5}, "hidden=48 .*heads=5"),
    ({"kv_heads": 3}, "heads=4 .*kv_heads=3"), ({"kv_heads": 8}, "heads=4 .*kv_heads=8"), ({"layers": 0}, "layers=0"),
    ({"vocab_size": -3}, "vocab_size=-3"), ({"hidden": 48.0}, "hidden=48.0"), ({"mlp_hidden": 0}, "mlp_hidden=0"),
    ({"context_length": 0}, "context_length=0"), ({"norm": "batchnorm"}, "norm='batchnorm'.*'layernorm' or 'rmsnorm'"),
    ({"activation": "relu"}, "activation='relu'.*'gelu' or 'swiglu' or 'geglu'"), ({"dropout": 1.0}, r"dropout=1\.0"),
    ({"head_dim": 0}, "head_dim=0: expected an integer of at least 1"), ({"head_dim": 12.0}, r"head_dim=12\.0"),
    ({"positions": "rotary", "head_dim": 7}, "turns 7 of a head's 7"), ({"dropout": -0.1}, r"dropout=-0\.1"),
    ({"positions": "alibi"}, "positions='alibi'.*'learned' or 'rotary'"), ({"kv_heads": False}, "kv_heads=False"),
    ({"positions": "rotary", "rotary_fraction": 0.1}, "rotary_fraction=0.1 turns 1 of"),
    ({"positions": "rotary", "rotary_fraction": 0.0}, "turns 0 "), ({"norm_eps": math.nan}, "norm_eps=nan"),
    ({"positions": "rotary", "heads": 16}, "turns 3 of a head's 3"), ({"norm_eps": math.inf}, "norm_eps=inf"),
    ({"layers": True}, "layers=True: expected an integer of at least 1"), ({"norm_eps": None}, "norm_eps=None"),
    ({"dropout": "0.1"}, r"dropout='0\.1': expected a number in \[0, 1\)"),
    ({"dropout": math.nan}, r"dropout=nan: expected a number in \[0, 1\)"),
    ({"norm_eps": -1e-5}, r"norm_eps=-1e-05: expected a number in \[0, inf\)"),
    ({"rotary_base": 0}, r"rotary_base=0: expected a number in \[1, inf\)"),
    ({"rotary_base": -10000.0}, r"rotary_base=-10000\.0"), ({"rotary_base": math.nan}, "rotary_base=nan"),
    ({"rotary_fraction": math.nan}, r"rotary_fraction=nan: expected a number in \[0, inf\)"),
    ({"rotary_fraction": -1.0}, r"rotary_fraction=-1\.0"), ({"rotary_fraction": "all"}, "rotary_fraction='all'")]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=[str(changes) for changes, _ in BAD_CONFIGS])
def test_numbers_that_make_no_model_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZES | changes)


def test_the_limits_themselves_are_taken():
    config = replace(GPT2, dropout=0, norm_eps=0, rotary_base=1, rotary_fraction=0)
    assert (config.dropout, config.norm_eps, config.rotary_base) == (0, 0, 1)
    for rotary_fraction, turned in ((1 / 6, 2), (1.0, 12)):
        assert replace(GPT2, positions="rotary", rotary_fraction=rotary_fraction).rotary_dim == turned


def test_what_was_derived_is_handed_on_and_none_derives_it_anew():
    wider = replace(GPT2, hidden=96, heads=8)
    assert (wider.kv_heads, wider.mlp_hidden) == (GPT2.kv_heads, GPT2.mlp_hidden) == (4, 192)
    assert wider.head_dim == 12 == replace(wider, hidden=48, heads=4).head_dim, "follows, unless it was given"
    assert replace(replace(GPT2, head_dim=20), hidden=96).head_dim == 20
    wider = replace(GPT2, hidden=96, heads=8, kv_heads=None, mlp_hidden=None)
    assert (wider.kv_heads, wider.mlp_hidden) == (8, 384)


def with_id(value):
    tokens = TOKENS.clone()
    tokens[1, 3] = value
    return tokens


BAD_INPUTS = [
    ((with_id(61),), {}, "tokens run from 0 to 61"), ((with_id(-1),), {}, "tokens run from -1 to 60"),
    ((TOKENS, with_id(61)), {}, "targets run from 0 to 61"), ((TOKENS, with_id(-5)), {}, "targets run from -5 to 60"),
    ((torch.zeros(1, 33, dtype=torch.int64),), {}, "33 tokens from position 0: the context has 32"),
    ((TOKENS,), {"offset": 25}, "8 tokens from position 25: the context has 32"), ((TOKENS.bool(),), {}, "torch.bool"),
    ((TOKENS,), {"offset": -1}, "from position -1"), ((TOKENS,), {"offset": 1.0}, r"from position 1\.0"),
    ((TOKENS[0],), {}, r"tokens of shape \(8,\)"), ((TOKENS[None],), {}, r"tokens of shape \(1, 2, 8\)"),
    ((TOKENS.float(),), {}, r"tokens of shape \(2, 8\), torch.float32"),
    ((TOKENS[:0],), {}, r"tokens of shape \(0, 8\)"), ((TOKENS[:, :0],), {}, r"tokens of shape \(2, 0\)"),
    ((TOKENS, TOKENS[:, :7]), {}, r"targets of shape \(2, 7\) for tokens of \(2, 8\)"),
    ((TOKENS, TOKENS[:1]), {}, r"targets of shape \(1, 8\) for tokens of \(2, 8\)"),
    ((TOKENS, TOKENS.double()), {}, r"targets of shape \(2, 8\), torch.float64")]


@pytest.mark.parametrize(("arguments", "options", "message"), BAD_INPUTS, ids=[message for *_, message in BAD_INPUTS])
@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_bad_input_is_refused_with_its_value(arguments, options, message, family):
    with pytest.raises(ValueError, match=message):
        GPT(family)(*arguments, **options)


@pytest.mark.parametrize(("arguments", "message"), [
    (([[1, 2]],), r"tokens as a list: expected a tensor \(B, T\), torch\.tensor\(\[\[…\]\]\)"),
    ((None,), "tokens as a NoneType"), ((TOKENS, TOKENS.tolist()), "targets as a list"),
    ((TOKENS.numpy(),), "tokens as a ndarray")])
def test_tokens_are_tensors(arguments, message):
    with pytest.raises(TypeError, match=message):
        GPT(GPT2)(*arguments)


def test_the_longest_sequence_and_the_last_position_are_taken():
    for family in (GPT2, LLAMA):
        model = GPT(family)
        assert model(torch.zeros(1, 32, dtype=torch.int64)).shape == (1, 32, 61)
        assert model(TOKENS, offset=24).shape == (2, 8, 61) and model(TOKENS[:1, :1]).shape == (1, 1, 61)


@pytest.mark.parametrize(("T", "S", "G", "causal"), [(5, 4, 2, True), (4, 4, 3, False)])
def test_attention_that_makes_no_sense_is_refused(T, S, G, causal):
    q, k = torch.zeros(1, 4, T, 8), torch.zeros(1, G, S, 8)
    with pytest.raises(ValueError, match=f"{T} queries in 4 heads, {S} keys in {G}"):
        softmax_attention(q, k, k, causal=causal)


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_of_each_token_may_be_given(name):
    model = lively(FAMILIES[name])
    expected, T = model(TOKENS, offset=3), TOKENS.shape[1]
    for positions in (torch.arange(3, 3 + T)[None], torch.arange(3, 3 + T).expand(len(TOKENS), T)):
        assert torch.equal(model(TOKENS, positions_BT=positions), expected)
    rows = torch.stack([torch.arange(5 * row, 5 * row + T) for row in range(len(TOKENS))])
    found = model(TOKENS, positions_BT=rows)
    for row, tokens in enumerate(TOKENS):
        torch.testing.assert_close(found[row], model(tokens[None], offset=5 * row)[0], rtol=1e-9, atol=1e-9)
    assert (found[1] - model(TOKENS)[1]).abs().max() > (1e-3 if FAMILIES[name].positions == "learned" else 0)


def test_rotary_tables_are_of_the_tokens_that_are_here():
    """And not of the context: at a million tokens two tables of 128 in fp32 would be 1.07 GB."""
    config = replace(LLAMA, context_length=2**20)
    model = GPT(config, dtype=torch.float32)
    assert list(model.buffers()) == []
    with memory.track(model) as t:
        tables = model.rotation(torch.zeros(2, 8, 48), positions_BT=torch.arange(2**20 - 8, 2**20)[None])
    assert sum(table.nbytes for table in tables) == 2 * 4 * 8 * config.rotary_dim
    assert t.peak.total - t.now["parameters"] < 2**14


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_positions_that_do_not_fit_are_named(family):
    model = GPT(family)
    for positions, error, words in (
            (torch.zeros(2, 7), ValueError, r"positions_BT of shape \(2, 7\), torch.float32"),
            (torch.zeros(2, 7).long(), ValueError, r"positions_BT of shape \(2, 7\) for tokens of \(2, 8\)"),
            ([0, 1], TypeError, "positions_BT as a list")):
        with pytest.raises(error, match=words):
            model(TOKENS, positions_BT=positions)


def test_a_learned_position_outside_the_context_is_named():
    with pytest.raises(ValueError, match=r"positions_BT run from 32 to 39: the context is 0…31"):
        GPT(GPT2)(TOKENS, positions_BT=torch.arange(32, 40)[None])
