"""Models that others wrote, tiny, split by plans: what the ranks of test_tensor_outside.py do."""

import copy

import torch
from outside.models import GROUPED, SMALL, causal, classifier, masked
from tensor_kit import block_of

from refimpl.tensor import tensor_parallel
from refimpl.tensor.split_plan import Column, Row

BERT, OPT = "bert.encoder.layer.*.", "model.decoder.layers.*."
PLANS = {
    "vit": {"blocks.*.attn.qkv": Column((32,) * 3, (4,) * 3), "blocks.*.attn.proj": Row(4),
            "blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row"},
    "bert": {**{f"{BERT}attention.self.{name}": "column" for name in ("query", "key", "value")}, f"{BERT}output.dense":
             "row", f"{BERT}attention.output.dense": "row", f"{BERT}intermediate.dense": "column"},
    "opt": {**{f"{OPT}self_attn.{name}_proj": "column" for name in "qkv"}, f"{OPT}self_attn.out_proj": "row",
            f"{OPT}fc1": "column", f"{OPT}fc2": "row", "model.decoder.embed_tokens": "vocabulary", "lm_head": "head"},
    "gpt_neox": None, "phi": None, "starcoder2": None}
TINY_OPT = causal("opt", vocab_size=61, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
                  word_embed_proj_dim=32, max_position_embeddings=32)
MODELS = {"bert": masked("bert"), "gpt_neox": causal("gpt_neox", **SMALL), "phi": causal("phi", **SMALL),
          "starcoder2": causal("starcoder2", **GROUPED), "opt": TINY_OPT,
          "vit": classifier("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)}


def score(model, name):
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return model(torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=generator)).square().mean()
    tokens = torch.randint(1, 61, (2, 7), generator=generator)
    return model(input_ids=tokens).logits.square().mean()


def distance(comm, name):
    """Return the largest difference of a score and of its gradients from the unsplit model, relative to their size."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    reference = copy.deepcopy(model)
    tensor_parallel(model, comm, PLANS[name])
    scores = [score(each, name) for each in (reference, model)]
    for each in scores:
        each.backward()
    wanted = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max() for gradient in wanted.values())
    far = [(p.grad - block_of(wanted[p.shard_spec.name], p.shard_spec)).abs().max() / largest
           for p in model.parameters() if p.shard_spec.name in wanted]
    return max(*far, (scores[0] - scores[1]).abs() / scores[0].abs()).item()
