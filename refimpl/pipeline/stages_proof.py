"""A decoder in stages is held to the whole, once for each class: a toy of it, in as many stages as it has layers, and
in three."""

import copy

import torch

from ..equivalence.comparison import CutDiffers, computed, difference
from ..equivalence.cut_over_ranks import first_line_of, whole_of
from ..equivalence.once_per_class import once
from ..others import ask
from .micro_batches import weights_of
from .stages import is_decoder, layers_of, stage_of

BY_HAND = "Build the stages yourself, and give PipelineParallelStage each one"


def prove_stages(model):
    """Prove that stages of a decoder of transformers, one after the other, compute what it does: its logits, its loss
    and every gradient. Other models are cut between modules that are called one after the other, and need no proof.
    CutDiffers if they do not; CannotShrink if no toy of it can be made."""
    if is_decoder(model):
        once("stages", model, _prove)


def _prove(model):
    with torch.enable_grad():
        toy, _, tokens, _ = whole_of(model)
        labels = tokens.clone()
        labels[0, 3:] = -100  # so two micro-batches have unlike numbers of targets
        other = copy.deepcopy(toy)
        whole = computed(other, lambda: ask("results", other, tokens, labels))
        first = {name: x[:1] for name, x in whole.outputs.items() if x.dim() > 2 and len(x) == len(tokens)}  # a row
        whole = whole._replace(outputs=first)
        for stages in sorted({layers_of(toy), min(layers_of(toy), 3)}):
            differs = difference(whole, _computed_in(stages, toy, tokens, labels))
            if differs is not None:
                raise CutDiffers(f"{type(model).__name__} in {stages} stages would not compute what it does whole: "
                                 f"{differs}, found on {ask('size', toy)}. {_advice(toy)}")


def _computed_in(stages, toy, tokens, labels):
    layers = layers_of(toy)
    ends = [layers * (i + 1) // stages for i in range(stages)]
    try:
        parts = [stage_of(toy, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        return computed(toy, lambda: _chained(parts, tokens, labels))
    except Exception as error:
        raise CutDiffers(f"{type(toy).__name__} cannot be computed in {stages} stages: {first_line_of(error)}. "
                         f"{BY_HAND}") from error


def _chained(parts, tokens, labels):
    """Compute row by row, as micro-batches, weighted as the executor weighs them."""
    logits, weights, loss = [], weights_of([(row,) for row in labels.split(1)], parts[-1].count_targets), 0
    for row, targets, weight in zip(tokens.split(1), labels.split(1), weights, strict=True):
        for part in parts[:-1]:
            row = part(row)
        logits.append(parts[-1](row))
        loss = loss + parts[-1](row, targets) * weight
    return {"logits": torch.cat(logits), "loss": loss}


def _advice(toy):
    if getattr(toy.config, "output_router_logits", False):
        return ("output_router_logits=True adds to the loss what the routers of all layers say, and a stage has some "
                "of them: set it to False, and add a balance loss of each layer to its output's gradient")
    return BY_HAND
