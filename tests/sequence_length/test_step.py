"""The closed form of a step is the dry run's peak to the byte, in every family and mode; wherever the peak is."""

import pytest
import torch

from refimpl.sequence_length import step, training_step_bytes

MODES = {"dense": {}, "flash": {"attention": "flash"}, "recomputed": {"recompute": True},
         "flash, recomputed": {"attention": "flash", "recompute": True}}


@pytest.mark.parametrize(("dtype", "mode"), [  # with bf16 both attentions, kept and recomputed, are there once
    *((torch.float32, mode) for mode in MODES), (torch.bfloat16, "dense"), (torch.bfloat16, "flash, recomputed")])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_predicted_and_measured(peak, family, name, dtype, mode):
    config = family(name, layers=2, vocab_size=50 if dtype is torch.float32 else 3000)
    options = MODES[mode] | {"dtype": dtype}
    assert training_step_bytes(config, 2, 200, **options).total == peak(config, 2, 200, **options)


@pytest.mark.parametrize(("name", "changes", "batch", "sequence", "options"), [
    ("gpt2", {"dropout": 0.1}, 3, 256, {}),
    ("gpt2", {"dropout": 0.1, "vocab_size": 50}, 3, 256, {"recompute": True}),
    ("llama", {"dropout": 0.1, "kv_heads": 1}, 2, 512, {"dtype": torch.bfloat16}),
    ("llama", {"dropout": 0.1, "kv_heads": 4, "norm": "layernorm"}, 2, 128, {"recompute": True}),
    ("neox", {"dropout": 0.1, "norm": "rmsnorm", "bias": False}, 2, 96, {"recompute": True}),
    ("neox", {"dropout": 0.1}, 3, 256, {}),
    ("llama", {"positions": "learned", "parallel_residual": True, "bias": True}, 2, 100, {"optimizer": "sgd"}),
    ("llama", {"rotary_fraction": 0.5, "tied": True}, 1, 200, {"attention": "flash", "dtype": torch.bfloat16}),
    ("gpt2", {"layers": 1, "activation": "swiglu"}, 1, 17, {"optimizer": "momentum"}),
    ("gpt2", {"layers": 6, "vocab_size": 10}, 2, 64, {"attention": "flash", "optimizer": "sgd"}),
    ("llama", {"layers": 5}, 1, 2, {"optimizer": "adam"}),
    ("neox", {"layers": 2, "kv_heads": 1}, 2, 300, {"recompute": True, "dtype": torch.bfloat16}),
])
def test_corners(peak, family, name, changes, batch, sequence, options):
    config = family(name, **changes)
    assert training_step_bytes(config, batch, sequence, **options).total == peak(config, batch, sequence, **options)


@pytest.mark.parametrize("forgotten", ["mlp", "attention", "head", "embeddings"])
def test_a_part_that_is_forgotten_is_seen(monkeypatch, family, peak, forgotten):
    """Each part has the peak somewhere: in the shapes of these tests, no part can be left out."""
    shapes = {"mlp": ({"mlp_hidden": 1024, "vocab_size": 10}, 64), "attention": ({"vocab_size": 10}, 512),
              "head": ({"vocab_size": 3000}, 64), "embeddings": ({"layers": 1, "hidden": 256}, 4)}
    changes, sequence = shapes[forgotten]
    config, options = family("gpt2", **changes), {"optimizer": "sgd"}
    expected = peak(config, 2, sequence, **options)
    assert training_step_bytes(config, 2, sequence, **options).total == expected
    monkeypatch.setattr(step, forgotten, lambda *args: iter(()))
    assert training_step_bytes(config, 2, sequence, **options).total != expected


def test_the_categories_are_the_trackers(family, trace):
    """To the byte; the one activation that it holds as a temporary is the last block's sum, which no graph keeps."""
    for options in ({}, {"attention": "flash", "optimizer": "sgd"}):
        t = trace(family("gpt2", vocab_size=10), 2, 256, **options)
        predicted = training_step_bytes(family("gpt2", vocab_size=10), 2, 256, **options)
        assert predicted["parameters"] == t.peak["parameters"] and predicted["gradients"] == t.peak["gradients"]
        assert predicted["optimizer state"] == t.peak["optimizer state"] and predicted["inputs"] == t.peak["inputs"]
        assert predicted["activations"] == t.peak["activations"]
        assert predicted["temporaries"] == t.peak["temporaries"]
