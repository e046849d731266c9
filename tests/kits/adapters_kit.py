"""A model with adapters of peft that is split: what the ranks of test_adapters.py do."""

import copy

import outside  # noqa: F401 - before peft imports torchvision
import torch
from tensor_kit import farthest, tokens_of, whole

from refimpl.tensor import tensor_parallel

LAYERS = "base_model.model.model.layers.*."
BY_COLUMNS = {f"{LAYERS}self_attn.{name}.{part}": "column" for name in ("q_proj", "v_proj")
              for part in ("base_layer", "lora_B.default")}
ADAPTERS = {**BY_COLUMNS, f"{LAYERS}self_attn.k_proj": "column", f"{LAYERS}self_attn.o_proj.base_layer": "row",
            f"{LAYERS}self_attn.o_proj.lora_A.default": "row", f"{LAYERS}mlp.gate_proj": "column",
            f"{LAYERS}mlp.up_proj": "column", f"{LAYERS}mlp.down_proj": "row"}


def with_adapters(dropout=0.0, model=None):
    from peft import LoraConfig, get_peft_model

    model = model or whole("llama")
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=dropout,
                                            init_lora_weights=False)).double()


def adapted(comm, dropout):
    """Return (largest difference of gradients from the unsplit model, and of those of weights that all ranks have)."""
    model = with_adapters(dropout)
    reference, tokens = copy.deepcopy(model), tokens_of(model)
    tensor_parallel(model, comm, ADAPTERS)
    for each in (reference, model):
        each(input_ids=tokens, labels=tokens).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    same = [comm.all_gather(p.grad[None]) for p in trained if p.shape == p.shard_spec.shape]
    assert len(same) == 3 * 2
    return farthest(trained, reference), max((each - each[:1]).abs().max().item() for each in same)
