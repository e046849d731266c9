"""Models that the bench of ZeRO trains beside the GPT of the pages, 10 to 20 million parameters each.

Each takes (tokens, targets) and returns the mean loss. Those of transformers need a checkout and the test extra.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .outside import kit

VOCABULARY, LARGE_VOCABULARY = 4096, 50_257
HIDDEN, LAYERS, HEADS, CONTEXT = 384, 6, 6, 64


class Block(nn.Module):
    """Attention and a gelu MLP, each with a LayerNorm before it."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        """Return the block's output, of x's shape (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SequentialGPT(nn.Module):
    """A GPT whose blocks are in nn.Sequential, and whose head has a weight of its own."""

    def __init__(self, vocabulary=VOCABULARY, hidden=HIDDEN, layers=LAYERS, heads=HEADS, context=CONTEXT):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens, targets):
        """Return the mean loss."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class WithLoss(nn.Module):
    """A model of transformers that takes (tokens, targets)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        """Return the mean loss."""
        return self.model(input_ids=tokens, labels=targets).loss


def _transformers(kind, **config):
    def build():
        *_, models = kit()
        return WithLoss(models.causal(kind, bos_token_id=None, eos_token_id=None, use_cache=False, **config)())

    return build


GPT2 = {"n_positions": CONTEXT, "n_layer": LAYERS, "n_head": HEADS}
TIED = "GPT-2 of transformers"
UNTIED = "Llama of transformers"
MODELS = {
    "GPT in nn.Sequential": SequentialGPT,
    TIED: _transformers("gpt2", vocab_size=VOCABULARY, n_embd=HIDDEN, **GPT2),
    UNTIED: _transformers("llama", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
                          num_attention_heads=HEADS, intermediate_size=1024, max_position_embeddings=CONTEXT),
    f"{TIED}, {LARGE_VOCABULARY:,} tokens": _transformers("gpt2", vocab_size=LARGE_VOCABULARY, n_embd=252, **GPT2)}


def available():
    """Return the names of the models that can be built here."""
    return [name for name in MODELS if MODELS[name] is SequentialGPT or kit() is not None]
