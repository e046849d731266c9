"""The closed form of a training step is the dry run's peak to the byte, wherever one of its moments is highest."""

import functools

import families
import pytest
import torch
from training_step import train

from refimpl import memory
from refimpl.common import step_bytes
from refimpl.memory import training_step_bytes, training_step_moments
from refimpl.model import GPTConfig

GPT2 = {"vocab_size": 300, "context_length": 512, "layers": 2, "hidden": 64, "heads": 4}
LLAMA = GPT2 | families.LLAMA | {"mlp_hidden": 176}
CASES = {  # changes, batch, sequence, dtype, optimizer, the highest moment
    "gpt2, loss": (GPT2 | {"vocab_size": 3000}, 2, 64, torch.float32, "adamw", "loss"),
    "gpt2, loss, bf16": (GPT2 | {"vocab_size": 3000}, 2, 200, torch.bfloat16, "sgd", "loss"),
    "gpt2, softmax": (GPT2 | {"vocab_size": 10}, 2, 256, torch.float32, "adamw", "softmax"),
    "gpt2, softmax, bf16, untied": (GPT2 | {"tied": False}, 1, 512, torch.bfloat16, "sgd", "softmax"),
    "gpt2, MLP": (GPT2 | {"vocab_size": 10, "mlp_hidden": 1024}, 2, 64, torch.float32, "momentum", "MLP"),
    "gpt2, embedding": (GPT2 | {"layers": 1, "hidden": 256, "vocab_size": 9000}, 1, 4, torch.float32, "sgd",
                        "embedding"),
    "llama, loss": (LLAMA | {"vocab_size": 3000}, 2, 100, torch.bfloat16, "adamw", "loss"),
    "llama, softmax": (LLAMA, 2, 512, torch.float32, "sgd", "softmax"),
    "llama, softmax, layernorm": (LLAMA | {"norm": "layernorm", "kv_heads": 4, "vocab_size": 9}, 2, 256, torch.bfloat16,
                                  "adamw", "softmax"),
    "gemma, softmax": (LLAMA | {"head_dim": 40, "activation": "geglu", "qkv_bias": True, "vocab_size": 9}, 2, 256,
                       torch.float32, "adamw", "softmax"),
    "gemma, MLP": (LLAMA | {"head_dim": 40, "activation": "geglu", "qkv_bias": True, "vocab_size": 10, "hidden": 256,
                            "mlp_hidden": 704}, 4, 64, torch.float32, "sgd", "MLP"),
    "llama, MLP": (LLAMA | {"vocab_size": 10, "hidden": 256, "mlp_hidden": 704}, 4, 128, torch.float32, "sgd", "MLP")}


@functools.cache
def measured(case):
    """(Arguments of the closed form, its highest moment, the peak by a dry run) of a case."""
    changes, *rest, highest = CASES[case]
    arguments = GPTConfig(**changes), *rest
    return arguments, highest, memory.dry_run(train, *arguments).peak


@pytest.mark.parametrize("case", CASES)
def test_predicted_and_measured(case):
    """Category by category. (No graph keeps the last block's output: to the tracker it may be a temporary.)"""
    arguments, highest, peak = measured(case)
    predicted = training_step_bytes(*arguments)
    assert predicted.total == peak.total and predicted == training_step_moments(*arguments)[highest]
    for category in ("parameters", "buffers", "optimizer state", "inputs", "gradients"):
        assert predicted[category] == peak[category]
    if highest == "loss":
        assert predicted == peak


@pytest.mark.parametrize("forgotten", ["loss", "MLP", "softmax", "embedding"])
def test_a_moment_that_is_forgotten_is_seen(monkeypatch, forgotten):
    """Each is the highest somewhere in these cases."""
    whole = step_bytes.training_step_moments
    monkeypatch.setattr(step_bytes, "training_step_moments", lambda *args: {
        name: ledger for name, ledger in whole(*args).items() if name != forgotten})
    seen = [case for case in CASES if training_step_bytes(*measured(case)[0]).total != measured(case)[2].total]
    assert seen and all(CASES[case][-1] == forgotten for case in seen)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_in_a_step_of_few_tokens_it_is_the_least(optimizer):
    """Then the optimizer's own temporaries may be highest, or a moment between: never less than the closed form."""
    for sequence in (1, 2, 16):
        arguments = GPTConfig(**GPT2 | {"hidden": 256}), 1, sequence, torch.float32, optimizer
        predicted, peak = training_step_bytes(*arguments).total, memory.dry_run(train, *arguments).peak.total
        assert 0.7 * peak < predicted <= peak


def test_on_cuda_norms_keep_less():
    cpu, cuda = (training_step_bytes(GPTConfig(**LLAMA), 2, 64, device=device) for device in ("cpu", "cuda"))
    assert cuda["activations"] < cpu["activations"] and cuda["parameters"] == cpu["parameters"]


@pytest.mark.parametrize(("changes", "arguments", "message"), [
    ({"dropout": 0.1}, {}, "dropout=0.1, parallel_residual=False, post_norms=False: this closed form covers none"),
    ({"parallel_residual": True}, {}, "parallel_residual=True, post_norms=False: this closed form covers none of them"),
    ({"post_norms": True}, {}, "post_norms=True: this closed form covers none of them; use memory.dry_run"),
    ({}, {"batch": 0}, "batch=0: expected an integer of at least 1"),
    ({}, {"sequence": 1.5}, "sequence=1.5: expected an integer of at least 1"),
    ({}, {"device": "mps"}, "device='mps': what its kernels keep is not known"),
    ({}, {"optimizer": "lion"}, "optimizer='lion': expected one of sgd"),
    ({}, {"dtype": torch.float64}, "dtype=torch.float64: expected one of torch.float32, torch.bfloat16")])
def test_what_it_does_not_cover_is_refused(changes, arguments, message):
    with pytest.raises(ValueError, match=message):
        training_step_bytes(GPTConfig(**GPT2 | changes), **{"batch": 2, "sequence": 64} | arguments)
