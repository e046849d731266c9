"""What tests of a split layer share: a block of our GPT and of transformers' LLaMA, as a whole and as its halves."""

import functools
from collections import namedtuple
from functools import partial

import torch
from outside.models import GROUPED
from paper_kit import TINY, built
from tensor_kit import with_exact_norms
from torch import nn
from torch.nn import functional as F

from refimpl.model import GPTConfig, rotate, softmax_attention
from refimpl.papers import tensor_parallel as paper
from refimpl.tensor import tensor_parallel
from refimpl.tensor.split_plan import Column, Row

B, T, ITEM = 2, 32, 8  # sequences, tokens in each, bytes of an element
WIDTH, HEAD = GROUPED["hidden_size"], GROUPED["head_dim"]
X = T * B * WIDTH * ITEM  # bytes
CONFIGS = {"gpt": GPTConfig(**TINY), "llama": GPTConfig(
    **TINY, kv_heads=GROUPED["num_key_value_heads"], norm="rmsnorm", norm_eps=1e-6, activation="swiglu", bias=False,
    mlp_hidden=GROUPED["intermediate_size"], positions="rotary", tied=False)}
WORLDS = {"gpt": (1, 2, 4), "llama": (1, 2)}  # which divide the key heads

# Half a layer, x + second(between(first(norm(x)))): `firsts` are side by side, in matrices of `sizes` features.
Half = namedtuple("Half", "norm firsts second between sizes")


def gpt():
    """Return a block of our GPT, its halves, and the whole of it as a function of (T, B, C)."""
    model = built("gpt", torch.float64)[0]
    block, c = model.blocks[0], model.config
    for name, p in block.named_parameters():
        if p.dim() == 1:  # biases and norms: not 0 and 1, as they begin
            nn.init.normal_(p, mean=float("norm" in name and "weight" in name), std=0.1)
    between = partial(paper.heads, head_dim=c.head_dim, attention=partial(softmax_attention, causal=True))
    halves = [Half(block.norm1, [block.attention.qkv], block.attention.out, between, [c.hidden] * 3),
              Half(block.norm2, [block.mlp.up], block.mlp.down, partial(F.gelu, approximate="tanh"), [c.mlp_hidden])]
    return block, halves, lambda x: block(x.transpose(0, 1)).transpose(0, 1)


@functools.cache
def tables():
    """Return cos and sin of all positions, (1, T, HEAD) each: what a layer is given, and no activation of it."""
    model = built("llama", torch.float64)[0].inner.model
    return model.rotary_emb(torch.zeros(B, T, WIDTH, dtype=torch.float64), torch.arange(T)[None])


def llama():
    """The same of transformers' LLaMA. Its norms compute in fp32, whatever it is built in: they become torch's."""
    block = with_exact_norms(built("llama", torch.float64)[0].inner.model).layers[0]
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        nn.init.normal_(norm.weight, mean=1.0, std=0.1)
    positions = tables()
    at, mlp, rows = block.self_attn, block.mlp, GROUPED["num_key_value_heads"] * HEAD
    halves = [Half(block.input_layernorm, [at.q_proj, at.k_proj, at.v_proj], at.o_proj,
                   partial(grouped, rotation=[table[0] for table in positions]), [WIDTH, rows, rows]),
              Half(block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], mlp.down_proj, swiglu,
                   [GROUPED["intermediate_size"]] * 2)]
    return block, halves, lambda x: first_of(block(x.transpose(0, 1), position_embeddings=positions)).transpose(0, 1)


def first_of(output):
    """Return the hidden states: some versions of transformers give a tuple."""
    return output[0] if isinstance(output, tuple) else output


def grouped(qkv_TBF, rotation):
    """Attention with rotary positions, two query heads for each key head."""
    x_BFTD = qkv_TBF.unflatten(2, (-1, HEAD)).permute(1, 2, 0, 3)
    q, k, v = x_BFTD.split([x_BFTD.shape[1] // 4 * part for part in (2, 1, 1)], dim=1)
    out = softmax_attention(rotate(q, *rotation), rotate(k, *rotation), v, causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def swiglu(y):
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up.contiguous()  # else autograd saves views, and so both in one


BLOCKS = {"gpt": gpt, "llama": llama}


def stacked(linears):
    """Several linear layers of the same input as one."""
    if len(linears) == 1:
        return linears[0]
    whole = nn.Linear(WIDTH, sum(linear.out_features for linear in linears), bias=False, dtype=torch.float64)
    whole.weight.data = torch.cat([linear.weight.detach() for linear in linears])
    return whole


def given():
    """Return x (T, B, C) and the gradient of the output."""
    return torch.randn(2, T, B, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def expected(name):
    """Return {what: tensor} of the unsplit block: its output, the gradient of x, those of each half's parameters."""
    _, halves, whole = BLOCKS[name]()
    x, d_out = given()
    out = whole(x.requires_grad_())
    out.backward(d_out)
    found = {"output": out.detach(), "x": x.grad}
    for i, half in enumerate(halves):
        weights, biases = ([getattr(linear, name) for linear in half.firsts] for name in ("weight", "bias"))
        found |= gradients_of(i, half.norm, weights, biases, half.second)
    return found


def gradients_of(i, norm, weights, biases, second):
    """Return {what: gradient} of half `i`, as `expected` names it."""
    found = {f"{i} norm {key}": p.grad for key, p in norm.named_parameters()}
    found |= {f"{i} a": torch.cat([weight.grad for weight in weights]), f"{i} b": second.weight.grad}
    if second.bias is not None:
        found |= {f"{i} a_bias": torch.cat([bias.grad for bias in biases]), f"{i} b_bias": second.bias.grad}
    return found


def together(name, ranks, sequence):
    """Put the ranks' parts of `expected` together. What all have must be alike on all."""
    sizes = [half.sizes for half in BLOCKS[name]()[1]]
    found = {}
    for key in ranks[0]:
        parts = [rank[key] for rank in ranks]
        if key in ("output", "x"):
            found[key] = torch.cat(parts) if sequence else alike(parts)
        elif key.endswith((" a", " a_bias")):
            pieces = [part.split([size // len(ranks) for size in sizes[int(key[0])]]) for part in parts]
            found[key] = torch.cat([torch.cat(matrix) for matrix in zip(*pieces, strict=True)])
        else:
            found[key] = torch.cat(parts, dim=1) if key.endswith(" b") else alike(parts)
    return found


def alike(parts):
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def by_paper(name, comm, sequence, split=paper.Split):
    """Return the split layer, and a function that returns the gradients of this rank's parameters."""
    layer = nn.Sequential(*(split(half.norm, stacked(half.firsts), *half[2:4], comm, half.sizes, sequence)
                            for half in BLOCKS[name]()[1]))

    def gradients():
        return {f"{key[0]} {key[2:].replace('.', ' ')}": torch.zeros_like(p) if p.grad is None else p.grad
                for key, p in layer.named_parameters()}

    return layer, gradients


class Hardened(nn.Module):
    """A block that `tensor_parallel` splits, as a layer of (T, B, C)."""

    def __init__(self, name, comm):
        super().__init__()
        self.block, halves, self.whole = BLOCKS[name]()
        names = {module: key for key, module in self.block.named_modules()}
        heads = self.block.attention.config.heads if name == "gpt" else None
        fused = Column(tuple(halves[0].sizes), (heads,) * 3) if name == "gpt" else "column"
        tensor_parallel(self.block, comm, {
            **{names[first]: fused for first in halves[0].firsts}, names[halves[0].second]: Row(heads),
            **{names[first]: "column" for first in halves[1].firsts}, names[halves[1].second]: "row"})
        part = self.block.get_submodule
        self.halves = [(half.norm, [part(names[first]) for first in half.firsts], part(names[half.second]))
                       for half in halves]

    def forward(self, x):
        return self.whole(x)

    def gradients(self):
        """{what: gradient of this rank's part}."""
        found = {}
        for i, (norm, firsts, second) in enumerate(self.halves):
            weights = [weight for first in firsts for weight in first.weights]
            found |= gradients_of(i, norm, weights, firsts[0].biases, second)
        return found


def by_hardened(name, comm, sequence):
    """The same of `tensor_parallel`."""
    layer = Hardened(name, comm)
    return layer, layer.gradients
