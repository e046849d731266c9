"""The MLP that keeps no hidden layer: numbers of the plain one, bytes by closed form, models of others, bad input."""

import contextlib
import copy
import itertools
import pickle
from functools import partial

import head_kit
import outside  # noqa: F401 - before transformers
import pytest
import torch
from outside.models import GROUPED, SMALL, causal, text
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.known_models import mlp as known_mlp
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


GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 1}
# A family: its configuration, and the activation that mlp_bytes knows; None for what is its own.
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "cohere", "cohere2", "diffllama", "ernie4_5", "exaone4",
                     "granite", "helium", "hunyuan_v1_dense", "ministral", "olmo", "olmo2", "olmo3", "smollm3",
                     "stablelm", "seed_oss"), (GROUPED, "swiglu")),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (GROUPED, "geglu_tanh")),
    **dict.fromkeys(("phi3", "glm", "glm4"), (GROUPED, "swiglu")),
    **dict.fromkeys(("nemotron", "persimmon", "arcee"), (GROUPED, "relu2")),
    "gpt2": (GPT2, "gelu_new"), "gptj": ({**GPT2, "rotary_dim": 8}, "gelu_new"), "phi": (SMALL, "gelu_new"),
    "codegen": ({**GPT2, "rotary_dim": 8}, "gelu_new"), "gpt_neox": (SMALL, "gelu"), "falcon": (SMALL, "gelu"),
    "gpt_bigcode": (GPT2, "gelu_tanh"), "starcoder2": (GROUPED, "gelu_tanh"),
    "gpt_neo": ({**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}, "gelu_new"),
    "bloom": ({"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, None),
    "mpt": ({"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4}, None),
    "falcon_h1": ({**GROUPED, **MAMBA, "mlp_multipliers": [0.5, 2.0]}, None), "deepseek_v4": (GROUPED, None),
    "llama4_text": ({**GROUPED, "num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 128}, "swiglu")}
# Of these a decoder layer calls the linear layers itself, or there is more between them.
REFUSED = {"opt": {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}, "biogpt": SMALL, "bitnet": GROUPED,
           "apertus": GROUPED}
MODELS = {**{name: causal(name, **config) for name, (config, _) in FAMILIES.items()}, "gpt": gpt,
          **{f"gpt {gated}": partial(gpt, mlp_hidden=48, activation=gated) for gated in ("swiglu", "geglu")}}
# Their residual is what their MLP is given, whose gradient is then a sum of three, in another order.
POST_NORMED = ("exaone4", "olmo2", "olmo3")
GEMMA3N = {"intermediate_size": [128, 128], "vocab_size_per_layer_input": 256, "laurel_rank": 8,
           "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": [0.9, 0.0], "num_kv_shared_layers": 0}


def step(model, batch, autocast=False):
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, autocast):
        loss = model(batch["input_ids"], batch["labels"]) if isinstance(model, GPT) else model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def served(name, **how):
    """(a model, the same with MLPs that are replaced, a batch)"""
    model, batch = MODELS[name](), text(2, 32)()
    other = copy.deepcopy(model)
    names = list(model.state_dict())
    assert memory_efficient_mlps(other, **how) == 2 and list(other.state_dict()) == names
    return model, other, batch


@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_models_are_theirs_to_the_bit(name):
    """In fp32 and bf16; dropout of 0.1, where a family has it by default, included."""
    models, batch = served(name)[:2], text(2, 32)()
    for dtype in (torch.float64,) if name in POST_NORMED else (torch.float32, torch.bfloat16):
        model, other = (each.to(dtype).train() for each in models)
        (expected, gradients), (loss, found) = step(model, batch), step(other, batch)
        bound = 1e-9 if name in POST_NORMED else 0
        assert torch.equal(loss, expected) and found.keys() == gradients.keys()
        assert [k for k, g in gradients.items() if (found[k] - g).norm() > bound * g.norm()] == []
        assert torch.equal(*(each.eval()(batch["input_ids"])[0] for each in models))
    with pytest.raises(ValueError, match="has no MLP"):
        memory_efficient_mlps(other)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["chunks", "recomputed"])
def test_in_models(name, how):
    model, other, batch = served(name, **{"keep": "hidden", "chunk_size": 50} if how == "chunks" else {})
    expected, gradients = step(model, batch)
    with recompute([m for m in other.modules() if isinstance(m, MemoryEfficientMLP)]) if how == "recomputed" else (
            contextlib.nullcontext()):
        loss, found = step(other, batch)
    assert abs(loss - expected) < 1e-5 and found.keys() == gradients.keys()
    assert [k for k, g in gradients.items() if (found[k] - g).norm() > 1e-4 * g.norm() + 1e-7] == []


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek_v4"])  # its routes are others in bf16
def test_errors_of_autocast_are_no_larger_than_the_plain_ones(name):
    """Beside the model without autocast: the error of all gradients, each by its own size."""
    model, other, batch = served(name)
    exact, gradients = step(model, batch)
    errors = []
    for each in (model, other):
        loss, found = step(each, batch, True)
        errors.append(sum(((found[k] - g).norm() / g.norm().clamp(min=1e-6)) ** 2 for k, g in gradients.items()))
        assert abs(loss - exact) < 2e-2 and all(found[k].dtype == g.dtype for k, g in gradients.items())
    assert errors[1] <= 1.05 * errors[0], errors


@pytest.mark.parametrize("name", [name for name, (_, activation) in FAMILIES.items() if activation])
@pytest.mark.parametrize("keep", ["input", "hidden"])
def test_bytes_of_a_layer_of_a_family_are_the_closed_forms(name, keep):
    """In evaluation, without dropout: before, what plain layers keep, and after."""
    model, activation = MODELS[name]().eval(), FAMILIES[name][1]
    mlp = next(m for m in model.modules() if m is not model and is_feed_forward(m))
    thrifty = MemoryEfficientMLP.of(mlp, keep=keep)
    fused, hidden = len(thrifty.names) == 2 and activation in GATED, thrifty._forms[True].hidden
    bias = any("bias" in key for key in dict(mlp.named_parameters()))
    x, upstream = torch.randn(96, 64), torch.randn(96, 64)
    x, upstream = (each[None] if name in ("gpt_neo",) else each for each in (x, upstream))
    before = read(mlp, type(mlp).__call__, x.clone().requires_grad_(), upstream)
    found = read(thrifty, ours, x.clone().requires_grad_(), upstream)
    form = mlp_bytes(96, 64, hidden, activation=activation, bias=bias, keep=keep, fused=fused)
    assert before[0] == plain_mlp_saved_bytes(96, hidden, activation=activation)
    assert found == (form.saved, form.forward, max(form.forward, form.backward))


def is_feed_forward(module):
    try:
        return bool(known_mlp.read(module))
    except TypeError:
        return False


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_not_served_are_named(name):
    model = causal(name, **REFUSED[name])()
    with pytest.raises(ValueError, match=r"has no MLP .*: .*layers.0.*, 64 to 128, and .*layers.0.*, 128 to 64"):
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
    several = "no function of each number"
    for layer, name, other, words in ((0, "up_proj", nn.Bilinear(64, 64, 128), "Bilinear, which is more than linear"),
                                      (1, "act_fn", nn.Dropout(0.1), several), (1, "act_fn", nn.RReLU(), several),
                                      (1, "act_fn", nn.Softshrink(), None)):
        llama = MODELS["llama"]()
        setattr(llama.model.layers[layer].mlp, name, other)
        with pytest.raises(TypeError, match=words) if words else contextlib.nullcontext():
            memory_efficient_mlps(llama)
        replaced = isinstance(llama.model.layers[1 - layer].mlp, MemoryEfficientMLP)
        assert replaced == (words is None), "none is replaced if one cannot be"


def test_sparse_gates_are_named():
    """Gemma 3n sets most of a gate to 0, by its mean and deviation."""
    model = causal("gemma3n_text", **{**GROUPED, **GEMMA3N})()
    with pytest.raises(TypeError, match="MLP computes .*mean, std.*is more than its linear layers have"):
        memory_efficient_mlps(model)
    assert not any(isinstance(module, MemoryEfficientMLP) for module in model.modules())


class Tricky(nn.Module):
    """Its forward does what a trace does not tell: `how` says which."""
    def __init__(self, how):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(D, H), nn.Linear(H, D), how

    def forward(self, x, scale=2.0):
        if self.how == "default":
            return self.down(F.relu(self.up(x))) * (1.0 if scale is None else scale)
        if self.how == "grad mode":
            with torch.no_grad():
                return self.down(F.relu(self.up(x)))
        if self.how == "autocast":
            with torch.autocast("cpu", enabled=False):
                return self.down(F.relu(self.up(x)))
        if self.how == "detached":
            return self.down(F.silu(self.up(x).detach()))
        if self.how == "tuple":
            return self.down(F.relu(self.up(x))), x
        if self.how == "sizes":
            return self.down(F.relu(self.up(x))) if len(x) < 4 else x
        return self.down(F.relu(self.up(x)).flip(1))


@pytest.mark.parametrize(("how", "words"), [
    ("detached", "detach"), ("grad mode", "in training|cannot be tried"), ("flip", "flip"),
    ("autocast", "under autocast"), ("sizes", "cannot be read")])
def test_what_a_trace_does_not_tell_is_found_by_trial(how, words):
    with pytest.raises(TypeError, match=words):
        MemoryEfficientMLP.of(Tricky(how))


@pytest.mark.parametrize("how", ["default", "tuple"])
def test_tuples_and_defaults_are_theirs(how):
    mlp, x = Tricky(how), torch.randn(2, 5, D)
    thrifty = MemoryEfficientMLP.of(mlp, chunk_size=3)
    for given in ({}, {"scale": 3.0}):
        torch.testing.assert_close(thrifty(x, **given), mlp(x, **given))
    def gradients(module):
        out = module(x)
        total = out[0].sum() if how == "tuple" else out.sum()
        return torch.autograd.grad(total, [*mlp.parameters()], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(gradients(thrifty), gradients(mlp))


def test_an_mlp_that_layers_share_stays_one():
    model = MODELS["llama"]()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert memory_efficient_mlps(model) == 1
    assert model.model.layers[1].mlp is model.model.layers[0].mlp


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_before_and_after(name):
    """Before, they are named when MLPs are to be replaced; after, at the first call: neither leaves them out."""
    import peft

    layers = ["gate_proj", "up_proj"] if name == "llama" else ["c_fc"]
    settings = peft.LoraConfig(target_modules=layers, fan_in_fan_out=name == "gpt2")
    adapted = peft.get_peft_model(MODELS[name](), settings)
    with pytest.raises(TypeError, match="is a peft.*Linear, which is more than linear"):
        memory_efficient_mlps(adapted)
    _, model, batch = served(name)
    with pytest.raises(TypeError, match="is a peft.*Linear, and was a .*: change layers before"):
        peft.get_peft_model(model, settings)(**batch)


def test_replacing_draws_no_numbers_and_a_copy_is_another():
    model = MODELS["gpt2"]()
    state = torch.get_rng_state()
    memory_efficient_mlps(model)
    assert torch.equal(torch.get_rng_state(), state)
    batch, other = text(2, 32)(), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not torch.equal(model(**batch).loss, other(**batch).loss)
    assert other.transformer.h[0].mlp.train(False).dropout.training is False
