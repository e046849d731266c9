"""Recall: copy the value of a key that was seen about 1,500 tokens earlier, by each attention, on one task and model.

    key value … key value …   1,024 tokens of filler   … key … key …
    the first 512 of 2,048                              the last 512: at each key its value is to be said

Each key occurs once among the pairs and is asked once, in another order, so that no fixed distance leads to it: 1,536
tokens on average, 1,024 at least. Loss and accuracy are of the answers alone; a model that knows nothing of the pairs
is right in 1 of 32. Queries, keys and values pass a short convolution first, so that a key and its value meet.
"Zoology" (Arora et al. 2023), section 3, has the task (multi-query associative recall), and why the convolution.

Attention under a mask can only answer where a path of the mask leads from the value to the question, over the layers:
the share of questions that one leads to stands beside the accuracy. Of native sparse attention that path is one of the
blocks that were picked. Linformer sees later tokens, too; its row says so.
"""

import functools
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from refimpl.attention import (
    GatedDeltaAttention,
    LinformerProjection,
    MaskedAttention,
    NativeSparseAttention,
    bigbird_mask,
    linear_attention,
    longformer_mask,
)

from .record import row
from .runner import BAR_DELAY

SEEDS = (0, 1, 2)
LEARNED = 0.99  # accuracy of the last 10 steps at which training ends before its last step
BLOCK, TOP_K, WINDOW, PROJECTED, KERNEL = 32, 8, 128, 256, "auto"
WITHIN = {"window": (0, 0.3), "native sparse": (0.95, 1)}  # the accuracy that is expected of 32 pairs


class Size(NamedTuple):
    """The task, the model and its training."""

    T: int = 2048
    span: int = 512  # tokens among which the pairs are, and those among which they are asked for
    pairs: int = 32  # keys, each of which has a value
    values: int = 32
    fillers: int = 1
    layers: int = 1
    hidden: int = 128
    heads: int = 2
    batch: int = 4
    steps: int = 120
    lr: float = 3e-3
    tested: int = 8  # sequences


def draw(size, count, generator):
    """Return (tokens, places of the questions, answers, places of their values), of `count` sequences."""
    random = functools.partial(torch.rand, generator=generator)
    tokens = torch.randint(0, size.fillers, (count, size.T), generator=generator) + size.pairs + size.values
    keys, asked = (random(count, size.pairs).argsort() for _ in range(2))  # in the order of the pairs; of questions
    said = torch.randint(0, size.values, (count, size.pairs), generator=generator)  # of each pair
    at = random(count, size.span // 2).argsort()[:, : size.pairs].sort().values * 2
    questions = random(count, size.span).argsort()[:, : size.pairs].sort().values + size.T - size.span
    tokens.scatter_(1, at, keys).scatter_(1, at + 1, said + size.pairs)
    tokens.scatter_(1, questions, keys.gather(1, asked))
    return tokens, questions, said.gather(1, asked), (at + 1).gather(1, asked)


def reached(layers, questions, places):
    """Return the share of questions to which a path leads from the value, given what sees what in each layer: booleans
    (sequences or 1, T, T)."""
    found = []
    for n, (its_questions, its_places) in enumerate(zip(questions, places, strict=True)):
        *before, last = [seen[n % len(seen)].float() for seen in layers]
        sees = functools.reduce(lambda sees, seen: ((sees @ seen) > 0).float(), reversed(before), last[its_questions])
        found.append(sees.gather(1, its_places[:, None]))
    return torch.cat(found).mean().item()


class Layer(nn.Module):
    """x + attention(conv(q, k, v of norm(x))), then an MLP. One key head for all query heads."""

    def __init__(self, size, attention):
        super().__init__()
        self.head_dim, self.heads, width = size.hidden // size.heads, size.heads, size.hidden
        features = width + 2 * self.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width)  # filler stays zeros
        self.qkv, self.out = nn.Linear(width, features, bias=False), nn.Linear(width, width, bias=False)
        self.now, self.before = (nn.Parameter(torch.zeros(features)) for _ in range(2))
        is_key = slice(width, width + self.head_dim)
        self.now.data[:], self.now.data[is_key], self.before.data[is_key] = 1, 0, 1
        # the first head finds what followed the same token from the start, which else takes thousands of steps to learn
        self.qkv.weight.data[: width + self.head_dim] *= 2
        self.qkv.weight.data[is_key] = self.qkv.weight.data[: self.head_dim]
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attention = attention

    def forward(self, x_BTC):
        """Map x (B, T, C) to (B, T, C)."""
        qkv = self.qkv(self.norm1(x_BTC))
        qkv = self.now * qkv + self.before * F.pad(qkv, (0, 0, 1, -1))  # a token and the one before it
        qkv = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        out_BHTD = self.attention(*qkv.split([self.heads, 1, 1], dim=1))
        x_BTC = x_BTC + self.out(out_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class Model(nn.Module):
    """Tokens (B, T), and places of questions (B, n), to logits of the values (B, n, values)."""

    def __init__(self, size, make):
        super().__init__()
        tokens = size.pairs + size.values + size.fillers
        self.embedding = nn.Embedding(tokens, size.hidden, padding_idx=tokens - 1)  # filler says nothing: zeros
        self.layers = nn.Sequential(*(Layer(size, make(size)) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.values, bias=False)

    def forward(self, tokens, questions):
        """Return the logits at the questions alone."""
        x_BTC = self.layers(self.embedding(tokens))
        return self.head(self.norm(x_BTC.gather(1, questions[..., None].expand(-1, -1, x_BTC.shape[-1]))))


def dense(q, k, v):
    """Attend to all tokens before."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


MASKS = {
    "window": lambda T: longformer_mask(T, WINDOW, causal=True),
    "window and globals": lambda T: longformer_mask(T, WINDOW, range(BLOCK, T, 2 * BLOCK), causal=True),
    "BigBird": lambda T: bigbird_mask(T, WINDOW, 0, TOP_K, 0, causal=True, block=BLOCK)}
KINDS = {  # name: a function of the size → the attention of one layer
    "dense": lambda size: dense,
    **{name: lambda size, mask=mask: MaskedAttention(mask, kernel=KERNEL) for name, mask in MASKS.items()},
    "native sparse": lambda size: NativeSparseAttention(size.hidden // size.heads, block=BLOCK, top_k=TOP_K,
                                                        window=WINDOW, kernel=KERNEL),
    "linear": lambda size: functools.partial(linear_attention, causal=True, kernel=KERNEL),
    "gated delta rule": lambda size: GatedDeltaAttention(size.heads, size.hidden // size.heads, kernel=KERNEL),
    "Linformer": lambda size: LinformerProjection(size.T, 1, PROJECTED)}
NOT_CAUSAL = ("Linformer",)  # those that see later tokens, which the table says


# --- the bench -------------------------------------------------------------------------------------------------------


def run(device="cpu", size=None, kinds=KINDS, seeds=SEEDS):
    """Return (settings, rows)."""
    size = size or Size()
    return {**size._asdict(), "window": WINDOW, "block": BLOCK, "top_k": TOP_K, "k": PROJECTED, "seeds": list(seeds),
            "chance": 1 / size.values, "learned": LEARNED}, rows(device, size, kinds, seeds)


def rows(device, size, kinds, seeds):
    """Yield the accuracy of each attention, by each seed."""
    cases = [(name, seed) for name in kinds for seed in seeds]
    for name, seed in tqdm(cases, "recall", delay=BAR_DELAY, leave=False):
        start = time.perf_counter()
        model, steps = learned(size, kinds[name], seed, device)
        tokens, questions, answers, places = draw(size, size.tested, torch.Generator().manual_seed(1000 + seed))
        layers = picks_of(model)
        with torch.no_grad():
            right = (model(tokens.to(device), questions.to(device)).argmax(-1).cpu() == answers).float().mean().item()
        if name in MASKS:
            layers = [MASKS[name](size.T).dense()[0]] * size.layers
        more = {"steps": steps, "seconds": time.perf_counter() - start}
        more |= {"reached": reached(layers, questions, places)} if layers else {}
        more |= {"note": "not causal"} if name in NOT_CAUSAL else {}
        more |= {"within": WITHIN[name][0] <= right <= WITHIN[name][1]} if name in WITHIN and size == Size() else {}
        yield row(f"recall, {name}, seed {seed}", "chance", "of answers", right, 1 / size.values, **more)


def picks_of(model):
    """List, once the model is called, what sees what in each layer whose blocks are picked, by any of its heads."""
    found = []

    def note(select, *given):
        mask = select(*given)
        found.append(mask.dense().any(1))
        return mask

    for layer in model.layers:
        if isinstance(layer.attention, NativeSparseAttention):
            layer.attention.select = functools.partial(note, layer.attention.select)
    return found


def optimizer_of(model, size):
    """Return AdamW. A number that φ makes of a block has 2,048 weights, each of which a step moves by the rate: at the
    rate of the others they would drown what φ begins as within ten steps."""
    slow = [p for name, p in model.named_parameters() if ".phi_" in name]
    rest = [p for name, p in model.named_parameters() if ".phi_" not in name]
    return torch.optim.AdamW([{"params": rest, "most": size.lr}, {"params": slow, "most": size.lr / 30}],
                             lr=size.lr, weight_decay=0.01)


def learned(size, make, seed, device):
    """Train until the answers of 10 steps are right, or for `size.steps`. Return (model, steps)."""
    torch.manual_seed(seed)
    model, generator = Model(size, make).to(device), torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model, size)
    right = []
    for step in range(1, size.steps + 1):
        tokens, questions, answers, _ = (x.to(device) for x in draw(size, size.batch, generator))
        for group in optimizer.param_groups:
            group["lr"] = group["most"] * min(1, step / 20)
        logits = model(tokens, questions)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        right.append((logits.argmax(-1) == answers).float().mean().item())
        if sum(right[-10:]) >= 10 * LEARNED:
            break
    return model, step
