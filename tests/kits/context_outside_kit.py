"""Models that others wrote, tiny, whose sequence is split: what the ranks of test_context_outside.py do."""

import functools

import torch
from outside.models import GROUPED, SMALL, causal, masked
from tensor_outside_kit import TINY_OPT

from refimpl.attention import Softcap, reference_attention
from refimpl.context import SequenceParallelAttention, context_parallel

GEMMA = {**GROUPED, "sliding_window": 4}
MODELS = {"bert": masked("bert"), "modernbert": masked("modernbert", local_attention=4, global_attn_every_n_layers=2),
          "opt": TINY_OPT, "gpt_neox": causal("gpt_neox", **SMALL),
          "gemma3": causal("gemma3_text", **GEMMA, layer_types=["sliding_attention", "full_attention"]),
          "qwen3": causal("qwen3", **GROUPED),
          "gemma2": causal("gemma2", **GEMMA, attn_logit_softcapping=2.0),
          "gpt_oss": causal("gpt_oss", **GEMMA, num_local_experts=4, num_experts_per_tok=2)}


def capped(*qkv, softcap=None, **options):
    return reference_attention(*qkv, score=None if softcap is None else Softcap(softcap), **options)


def distance(comm, name, method, wrong=False):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape)  # as they begin, tokens hardly see each other
    tokens = torch.randint(1, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    attention = SequenceParallelAttention(comm, method, attention=None if method == "ring" else capped)
    if wrong:
        attention.attention = functools.partial(capped)  # another one, so that it is proven anew
        attention.positions = lambda length, device=None: torch.arange(length)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = attention.gather(context_parallel(model, attention)(input_ids=attention.shard(tokens)).logits)
    return ((found - expected).abs().max() / expected.abs().max()).item()
