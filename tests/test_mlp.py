"""The MLP that keeps no hidden layer: numbers of the plain one, bytes by closed form, models of others, bad input."""

import copy
import itertools
from functools import partial

import head_kit
import outside  # noqa: F401 - before transformers
import pytest
import torch
from outside.models import GROUPED, SMALL, causal, text
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.mlp import ACTIVATIONS, GATED, MemoryEfficientMLP, memory_efficient_mlps, mlp_bytes, plain_mlp_saved_bytes
from refimpl.model import GPT, GPTConfig

PLAIN = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu}
D, H = 8, 24
SHAPES = ((96, 8, 24), (33, 40, 20), (20, 6, 100))  # N, d, hidden
ours = MemoryEfficientMLP.__call__


def plain(mlp, x):
    act = PLAIN[GATED.get(mlp.activation, mlp.activation)]
    if mlp.activation in GATED:
        return mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))
    return mlp.down_proj(act(mlp.up_proj(x)))


def outputs(call, mlp, x, upstream):
    y = call(mlp, x)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, *mlp.parameters()) if t.requires_grad], upstream)]


@pytest.mark.core
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("keep", ["input", "hidden"])
def test_numbers_are_the_plain_ones(activation, keep):
    for chunk_size, bias in itertools.product((None, 1, 5, 16, 100), (True, False)):
        mlp = MemoryEfficientMLP(D, H, activation, bias=bias, keep=keep, chunk_size=chunk_size, dtype=torch.float64)
        x, upstream = torch.randn(2, 3, 7, D, dtype=torch.float64)
        found, expected = (outputs(call, mlp, x.requires_grad_(), upstream) for call in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_error_in_bf16_is_no_larger_than_the_plain_ones(activation, chunk_size):
    sums = torch.zeros(2, dtype=torch.float64)
    for _ in range(6):
        mlp = MemoryEfficientMLP(32, 64, activation, bias=False, chunk_size=chunk_size, dtype=torch.bfloat16)
        x, upstream = torch.randn(2, 128, 32, dtype=torch.bfloat16)
        exact = copy.deepcopy(mlp).double()
        reference = outputs(plain, exact, x.double().requires_grad_(), upstream.double())
        for k, call in enumerate((ours, plain)):
            found = outputs(call, mlp, x.requires_grad_(), upstream)
            sums[k] += sum(((a.double() - b).norm() / b.norm()) ** 2 for a, b in zip(found, reference, strict=True))
    assert sums[0] <= 1.02 * sums[1], sums


def read(mlp, call, x, upstream):
    """(kept beside the output, peak of forward, peak of all)"""
    kept, forward, peak = head_kit.read(lambda: call(mlp, x), x, upstream, *mlp.parameters(), upstream=upstream)
    return kept - x.nbytes, forward, peak


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", "swiglu"])
@pytest.mark.parametrize("keep", ["input", "hidden"])
def test_bytes_are_the_closed_forms(dtype, activation, keep):
    for (N, d, hidden), chunk_size, bias in itertools.product(SHAPES, (None, 7, 32, 200), (True, False)):
        mlp = MemoryEfficientMLP(d, hidden, activation, bias=bias, keep=keep, chunk_size=chunk_size, dtype=dtype)
        x, upstream = torch.randn(2, N, d, dtype=dtype)
        kept, forward, peak = read(mlp, ours, x.requires_grad_(), upstream)
        form = mlp_bytes(N, d, hidden, dtype, activation=activation, bias=bias, keep=keep, chunk_size=chunk_size)
        assert (kept, forward) == form[:2] and peak == max(form.forward, form.backward)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_plain_layers_keep_what_is_said_and_fail_the_closed_form(activation):
    mlp = MemoryEfficientMLP(D, H, activation)
    x, upstream = torch.randn(2, 96, D)
    kept, forward, _ = read(mlp, plain, x.requires_grad_(), upstream)
    assert kept == plain_mlp_saved_bytes(96, H, activation=activation)
    assert kept > mlp_bytes(96, D, H, activation=activation, keep="hidden").saved or activation == "relu"
    assert forward > mlp_bytes(96, D, H, activation=activation).forward


def test_frozen_weights_and_frozen_input():
    mlp = MemoryEfficientMLP(D, H, "swiglu", chunk_size=5)
    for frozen in ("up_proj", "gate_proj", "down_proj"):
        getattr(mlp, frozen).requires_grad_(False)
        for needs_x in (True, False):
            x, upstream = torch.randn(21, D, requires_grad=needs_x), torch.randn(21, D)
            if needs_x or any(p.requires_grad for p in mlp.parameters()):
                torch.testing.assert_close(*(outputs(call, mlp, x, upstream) for call in (ours, plain)))


def test_without_gradients_nothing_is_kept():
    mlp, x = MemoryEfficientMLP(D, H, "swiglu", keep="hidden"), torch.randn(96, D)
    with torch.no_grad(), memory.track(mlp, x) as t:
        y = mlp(x)
    assert t.now.total - t.start.total == y.nbytes and not y.requires_grad
    assert t.peak.total - t.start.total == mlp_bytes(96, D, H, activation="swiglu").forward


def test_no_tokens():
    mlp = MemoryEfficientMLP(D, H, "swiglu")
    mlp(torch.zeros(0, D, requires_grad=True)).sum().backward()
    assert all((p.grad == 0).all() for p in mlp.parameters())


def test_autocast():
    mlp = MemoryEfficientMLP(D, H, "swiglu", chunk_size=5)
    x, upstream = torch.randn(21, D, requires_grad=True), torch.randn(21, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = mlp(x), plain(mlp, x)
    assert found.dtype == expected.dtype == torch.bfloat16
    given = [x, *mlp.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, given, upstream) for y in (found, expected)), strict=True):
        assert a.dtype == b.dtype == torch.float32 and (a - b).norm() < 2e-2 * b.norm()


def test_autocast_leaves_fp64_as_it_is():
    mlp, x = MemoryEfficientMLP(D, H, "swiglu", dtype=torch.float64), torch.randn(21, D, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = mlp(x), plain(mlp, x)
    assert found.dtype == expected.dtype == torch.float64 and (found - expected).abs().max() < 1e-13


def gpt(**how):
    return GPT(GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=32, heads=4, **how))


MODELS = {**{name: causal(name, **GROUPED) for name in ("llama", "gemma", "qwen2")}, "gpt": gpt,
          **{f"gpt {gated}": partial(gpt, mlp_hidden=48, activation=gated) for gated in ("swiglu", "geglu")}}
# What they need beside GROUPED, and what they do more.
MORE = {"falcon_h1": ({"mlp_multipliers": [0.5, 2.0], "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
                       "mamba_d_state": 16, "mamba_expand": 1}, "act_fn, mul_1, down_proj, mul_2"),
        "seed_oss": ({}, "down_proj, dropout"), "deepseek_v4": ({}, "gate_proj, clamp, up_proj, clamp_1"),
        "gemma3n_text": ({"intermediate_size": [128, 128], "vocab_size_per_layer_input": 256, "laurel_rank": 8,
                          "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": [0.9, 0.0],
                          "num_kv_shared_layers": 0}, "mean, std")}


def step(model, batch):
    loss = model(batch["input_ids"], batch["labels"]) if isinstance(model, GPT) else model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{}, {"keep": "hidden", "chunk_size": 100}], ids=["", "chunks"])
def test_in_models(name, how):
    model, batch = MODELS[name](), text(4, 64)()
    expected, gradients = step(copy.deepcopy(model), batch)
    names = list(model.state_dict())
    assert memory_efficient_mlps(model, **how) == 2 and list(model.state_dict()) == names
    loss, found = step(model, batch)
    assert abs(loss - expected) < 1e-5 and found.keys() == gradients.keys()
    assert all((found[k] - g).norm() < 1e-4 * g.norm() + 1e-7 for k, g in gradients.items())
    with pytest.raises(ValueError, match="has no MLP"):
        memory_efficient_mlps(model)


def test_the_peak_of_a_llama_falls_by_its_hidden_layers():
    """Of each layer 4·N·h·e is not kept; in backward one layer at a time has as much."""
    model, batch = causal("llama", **GROUPED | {"num_hidden_layers": 5, "intermediate_size": 512})(), text(4, 64)()
    before, of_one = head_kit.peak_of(model, batch), plain_mlp_saved_bytes(4 * 64, 512, activation="swiglu")
    memory_efficient_mlps(model)
    assert 4 * of_one <= before - head_kit.peak_of(model, batch) <= 5 * of_one


def test_bad_input_is_named():
    for how, words in (({"activation": "tanh"}, "activation='tanh'"), ({"keep": "all"}, "keep='all'"),
                       ({"chunk_size": 0}, "chunk_size=0")):
        with pytest.raises(ValueError, match=words):
            MemoryEfficientMLP(D, H, **how)
    mlp = MemoryEfficientMLP(D, H)
    with pytest.raises(ValueError, match=r"x \(3, 7\): expected \(…, 8\)"):
        mlp(torch.zeros(3, 7))
    with pytest.raises(TypeError, match="bfloat16, the weights of torch.float32"):
        mlp(torch.zeros(3, D, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="create_graph"):
        x = torch.zeros(3, D, requires_grad=True)
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)


def test_layers_that_are_something_else_are_named():
    gpt2 = causal("gpt2", **{**SMALL, "n_embd": 64, "n_layer": 2, "n_head": 4})()
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no MLP with layers named up_proj and down_proj"):
        memory_efficient_mlps(gpt2)
    for layer, name, other, words in ((0, "up_proj", nn.Bilinear(2, 2, 2), "up_proj: Bilinear"),
                                      (1, "act_fn", nn.Tanh(), "activation Tanh")):
        llama = MODELS["llama"]()
        setattr(llama.model.layers[layer].mlp, name, other)
        with pytest.raises(TypeError, match=words):
            memory_efficient_mlps(llama)
    assert type(llama.model.layers[0].mlp).__name__ == "LlamaMLP"  # none is replaced if one cannot be


@pytest.mark.parametrize("name", MORE)
def test_a_forward_that_does_more_with_these_layers_is_named(name):
    """They have a Llama's names; computed as a Llama's layers, gradients were wrong and nothing said so."""
    config, words = MORE[name]
    model = causal(name, **{**GROUPED, **config})()
    with pytest.raises(TypeError, match=f"MLP computes .*{words}.*: expected down_proj"):
        memory_efficient_mlps(model)
    assert not any(isinstance(module, MemoryEfficientMLP) for module in model.modules())


def test_a_factor_of_1_and_a_dropout_of_0_are_nothing():
    config = {**MORE["falcon_h1"][0], "mlp_multipliers": [1.0, 1.0]}
    assert memory_efficient_mlps(causal("falcon_h1", **GROUPED, **config)()) == 2
    assert memory_efficient_mlps(causal("seed_oss", **GROUPED, residual_dropout=0.0)()) == 2
