"""Whole models in a pipeline: the loss and the gradients of the unsplit model, tied weights too."""

import copy

import pytest
import torch
from rank_pool import pooled
from tensor_kit import GPTS, bodies, tokens_of, whole
from torch import nn

from refimpl.model import GPT
from refimpl.pipeline import pipeline

NAMES = [*GPTS, "gpt2", "llama", "tied llama", "qwen2", "mistral"]
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}


def batch_of(model):
    tokens = tokens_of(model, 7, 7)
    targets = tokens.roll(-1, 1) if isinstance(model, GPT) else tokens.clone()
    targets[0], targets[1, 3:], targets[5] = -100, -100, -100  # micro-batches differ in targets; one has none
    return tokens, targets


def loss_of(model, tokens, targets):
    if isinstance(model, GPT):
        return model(tokens, targets)
    return model(input_ids=tokens, labels=targets, use_cache=False).loss  # a cache knows layers by their numbers


def distances(comm, name, schedule, m, dtype, only_here=False, tied=True):
    """Return {what: the largest difference from the unsplit model}, relative to its size."""
    model = deep(whole(name, dtype))
    reference = copy.deepcopy(model)
    tokens, targets = batch_of(model)
    pipe = pipeline(model, comm, schedule, m)
    if not tied:
        pipe._ties._copies.clear()
    found = {}
    for _ in range(2):  # gradients add up, and are those of the second step alone after zero_grad
        theirs = loss_of(reference, tokens, targets)
        theirs.backward()
        loss = pipe.train_step(tokens if not only_here or 0 in pipe.stages else None,
                               targets if not only_here or pipe.schedule.stages - 1 in pipe.stages else None)
        if loss is not None:
            found["loss"] = max(found.get("loss", 0), (loss - theirs).abs().item() / theirs.item())
    gradients = {key: p.grad for key, p in reference.named_parameters(remove_duplicate=False)}
    for stage in pipe.stages.values():
        for key, p in stage.named_parameters(remove_duplicate=False):
            found[key] = ((p.grad - gradients[key]).abs().max() / gradients[key].abs().max()).item()
    return found


def loss_in_fp64(logits, labels, vocab_size, **_):
    """Score as transformers' models do, which score in fp32 whatever they are built in; this keeps fp64."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def deep(model):
    """Give a model four layers, so that four ranks have one each."""
    layers = bodies(model)
    for _ in range(2):
        layers.append(copy.deepcopy(layers[0]))
        for p in layers[-1].parameters():
            p.data += 0.01
    if not isinstance(model, GPT):
        if model.dtype == torch.float64:
            model.loss_function = loss_in_fp64
        model.config.num_hidden_layers = 4
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = 2 * model.config.layer_types
    return model


def too_far(comm, cases):
    """Return {case: {what: the largest difference}} of those above what the case's dtype allows."""
    found = {str(case): (distances(comm, *case), DTYPES[case[3]]) for case in cases}
    return {case: far for case, (differences, most) in found.items()
            if (far := {key: each for key, each in differences.items() if not each <= most})}


FP64, FP32 = torch.float64, torch.float32
CASES = {"one rank": (1, [(name, "1f1b", 5, FP64) for name in ("gpt", "tied llama")]),
         "backward in two": (2, [(name, "zb-h1", 5, FP64) for name in NAMES]),
         "batch at the ends": (4, [(name, "1f1b", 5, FP64, True) for name in NAMES]),
         "fp32": (2, [(name, "zb-h1", 5, FP32) for name in ("gpt", "llama")]), "two stages on a rank": (2, [
             (name, schedule, 4, FP64) for name in ("gpt", "gpt2", "tied llama")
             for schedule in ("interleaved", "zb-v", "dualpipe-v")])}


@pytest.mark.parametrize("kind", CASES)
def test_the_gradients_of_the_unsplit_model(kind):
    N, cases = CASES[kind]
    assert pooled(too_far, N, cases) == [{}] * N


@pytest.mark.parametrize("name", ["gpt", "gpt2", "tied llama"])
def test_without_the_sum_of_tied_gradients_they_are_wrong(name):
    wrong = {key for found in pooled(distances, 2, name, "1f1b", 4, torch.float64, False, False)
             for key, each in found.items() if not each <= 1e-12}
    assert len(wrong) == 2 and any("head" in key for key in wrong)
