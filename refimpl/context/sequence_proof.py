"""A model that is given a part of a sequence on each rank is held to the whole, once for each class."""

import copy

import torch
from torch.nn import functional as F

from ..equivalence.comparison import Computed, computed
from ..equivalence.cut_over_ranks import prove, weights_of
from ..equivalence.loss_check import shifts


def prove_context(model, attention, give):
    """Prove that a model of transformers computes on parts of a sequence what it computes on the whole. `give(model,
    attention)` gives it the attention. CutDiffers if it does not; CannotShrink if no toy of it can be made."""
    if attention.comm.world_size == 1:
        return

    def cut(toy, comm, summed):
        own = copy.copy(attention)
        own.comm = comm
        toy.attention_of_parts, toy.shifts = own, toy.get_output_embeddings() is not None and shifts(toy)
        return give(toy, own)

    # A ring that is not plain refuses a window shorter than the sequence when it meets one; a real one may be shorter.
    question = ("context", attention.method, attention.order, attention.attention)
    prove(model, question, cut, run=_run, whole_windows=attention.method == "ring" and attention.order != "plain")


def _run(toy, comm, tokens):
    """Compute a rank's part of the loss, and gather: losses and gradients are sums over ranks."""
    attention, kind = toy.attention_of_parts, "output" if toy.get_output_embeddings() is None else "logits"
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100) if toy.shifts else tokens
    mine, count, targets = attention.shard(tokens), (targets != -100).sum(), attention.shard(targets)
    labels = {"labels": targets, "shift_labels": targets} if toy.shifts else {}
    share = (targets != -100).sum() / count

    def part():
        if kind == "output":
            output = toy(input_ids=mine, use_cache=False)[0]
            return {kind: output, "loss": (output * attention.shard(weights_of(output, tokens.shape[1]))).sum()}
        output = toy(input_ids=mine, **labels, use_cache=False)
        loss = output.loss if toy.shifts else F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        return {kind: output.logits, "loss": loss * share}

    found = computed(toy, part)
    results = {kind: attention.gather(found.results[kind]), "loss": comm.all_reduce(found.results["loss"])}
    outputs = {name: attention.gather(x) for name, x in found.outputs.items()
               if x.dim() == 3 and x.shape[1] == mine.shape[1]}
    gradients = {name: comm.all_reduce(torch.zeros_like(toy.get_parameter(name)) if x is None else x)
                 for name, x in found.gradients.items()}
    return Computed(outputs, results, gradients)
