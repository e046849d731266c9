"""A GPT written by hand, as tutorials have it: fused attention, tied head, micro-steps, clipped gradients."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
V, T, C, H = 1024, 128, 128, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (each.view(B, T, H, C // H).transpose(1, 2) for each in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.LayerNorm(C), nn.LayerNorm(C), Attention()
        self.up, self.down, self.drop = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, V), targets.flatten())


model = Small()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    for _ in range(2):
        tokens = torch.randint(V, (4, T + 1))
        logits, loss = model(tokens[:, :-1], tokens[:, 1:])
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
