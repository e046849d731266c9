"""What the tests of estimates share: tiny models in all three forms, and what real ranks read of them."""

import json
import re

import outside  # noqa: F401 - so that transformers can be imported
import torch

from refimpl.estimate import Options
from refimpl.estimate.tracked_step import train

CONFIGS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"model_type": "llama", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 88,
              "tie_word_embeddings": False}}
BERT = {"model_type": "bert", "vocab_size": 61, "max_position_embeddings": 32, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONFIGS |= {
    "masked": BERT | {"architectures": ["BertForMaskedLM"]},
    "classifier": BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 61, "d_model": 32,
           "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 61,
                "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
                "max_source_positions": 20, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1,
                "eos_token_id": 2, "decoder_start_token_id": 1},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 4,
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}}
BUILD = """
import torch
from refimpl.model import GPT, GPTConfig
CONFIG = {"vocab_size": 61, "context_length": 32, "layers": 2, "hidden": 32, "heads": 4}
def gpt():
    return GPT(GPTConfig(**CONFIG))
def gemma(batch, sequence=16):
    model = GPT(GPTConfig(**CONFIG, kv_heads=2, head_dim=12, norm="rmsnorm", activation="geglu", positions="rotary",
                          bias=False, post_norms=True, dropout=0.1))
    return model, (torch.zeros(batch, sequence, dtype=torch.int64),) * 2
class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    def forward(self, x, y):
        return {"loss": (self.layers(x) - y).square().mean()}
def regression(batch):
    return Regression(), {"x": torch.randn(batch, 8), "y": torch.randn(batch, 1)}
def frozen():
    return Regression().requires_grad_(False), {"x": torch.randn(2, 8), "y": torch.randn(2, 1)}
def of_a_width(batch, width):
    return torch.nn.Linear(width, 8), torch.randn(batch, width)
def no_loss():
    return torch.nn.Linear(8, 8), torch.randn(2, 8)
def no_batch():
    return torch.nn.Linear(8, 8)
def no_model():
    return 3
def looks_at_values():
    return torch.nn.Linear(8, torch.rand(5).nonzero().shape[0])
def refuses():
    raise ValueError("three heads")
def fails():
    return torch.nn.Linear(8, UNHEARD_OF)
"""


def write(folder):
    """Write the tiny models to files; return {name: what names it}."""
    (folder / "build.py").write_text(BUILD)
    names = {name: f"{folder / 'build.py'}:{name}" for name in [*re.findall(r"^def (\w+)", BUILD, re.M), "absent"]}
    for name, config in CONFIGS.items():
        path = folder / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        names[name] = str(path)
    return names


def as_read(comm, cases):
    """[(peak, {phase: Ledger}, resting)] that a real rank reads of each (model, options)."""
    torch.set_num_threads(1)
    return [read(train(comm, model, Options(gpu="cpu", **options)).trace) for model, options in cases]


def read(trace):
    return trace.peak, {phase: trace.peak_moment(phase).ledger for phase in ("forward", "backward", "step")}, trace.now
