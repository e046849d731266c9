"""A decoder in stages is held to the whole, once for each class: a toy of it, in as many stages as it has layers, and
in three."""

import torch

from ..proof.compare import CutDiffers, computed, difference
from ..proof.once import once
from ..proof.ranks import said, whole_of
from ..proof.toys import described
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
        toy, _, tokens, whole = whole_of(model)
        for stages in sorted({layers_of(toy), min(layers_of(toy), 3)}):
            differs = difference(whole, _computed_in(stages, toy, tokens))
            if differs is not None:
                raise CutDiffers(f"{type(model).__name__} in {stages} stages would not compute what it does whole: "
                                 f"{differs}, found on {described(toy)}. {_advice(toy)}")


def _computed_in(stages, toy, tokens):
    layers = layers_of(toy)
    ends = [layers * (i + 1) // stages for i in range(stages)]
    try:
        parts = [stage_of(toy, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        return computed(toy, lambda: _chained(parts, tokens))
    except Exception as error:
        raise CutDiffers(f"{type(toy).__name__} cannot be computed in {stages} stages: {said(error)}. "
                         f"{BY_HAND}") from error


def _chained(parts, tokens):
    x = tokens
    for part in parts[:-1]:
        x = part(x)
    return {"logits": parts[-1](x), "loss": parts[-1](x, tokens)}


def _advice(toy):
    if getattr(toy.config, "output_router_logits", False):
        return ("output_router_logits=True adds to the loss what the routers of all layers say, and a stage has some "
                "of them: set it to False, and add a balance loss of each layer to its output's gradient")
    return BY_HAND
