"""A model as a run of layers, and a stage of it: our GPT, nn.Sequential, decoders of Hugging Face.

A stage is the model itself without what other stages have. Its parameters keep the names that they have in the model,
so that the states of all stages together are the model's. It is called with the model's inputs if it is the first one,
else with the x of the one before; the last one takes targets, too, and returns the mean loss.
"""

import copy
from collections import OrderedDict

from torch import nn

from ...model import GPT

FRONT, BACK, ALL = ("wte", "wpe", "drop", "embed_tokens"), ("ln_f", "norm"), ("rotary_emb",)  # of Hugging Face's bases


class Some(nn.ModuleList):
    """Some of a model's layers, under the names that they have there."""

    def __init__(self, layers, chosen):
        super().__init__()
        self._modules = {str(i): layers[i] for i in chosen}

    def __getitem__(self, place):
        found = list(self._modules.values())[place]
        return found if isinstance(found, nn.Module) else list(found)


def layers_of(model):
    """Return how many layers a model has. TypeError for one whose layers are not known."""
    return len(_kind(model).layers(model))


def stage_of(model, first, end):
    """Return a stage: a model's layers from `first` until before `end`, with what is before layer 0 and after the last.

    It shares the parameters of `model`, which does not change.
    """
    return part_of(model, range(first, end))


def part_of(model, chosen):
    """Return a module of some layers, of which others may be between: all that a rank of several stages has."""
    return _kind(model).stage(model, chosen)


def without(module, **others):
    """Return a module that shares all with `module`; `others` replaces children, or leaves those out that are None."""
    shell = copy.copy(module)
    shell._parameters, shell._buffers = dict(module._parameters), dict(module._buffers)
    shell._modules = {name: others.get(name, child) for name, child in module._modules.items()
                      if others.get(name, child) is not None}
    return shell


# --- our GPT ---------------------------------------------------------------------------------------------------------


class GPTStage(GPT):
    """Some blocks of a GPT, with the embedding if they are the first, and the head if they are the last."""

    def forward(self, x, targets_BT=None, *, positions_BT=None):
        """Map tokens, or the x (B, T, C) of the stage before, to x; or to the logits, or the mean loss.
        `positions_BT`: as GPT takes them, where a sequence is cut over ranks."""
        x_BTC = self.embed(x, positions_BT=positions_BT) if self.is_first else x
        rotation = self.rotation(x_BTC, positions_BT=positions_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation)
        return self.predict(x_BTC, targets_BT) if self.is_last else x_BTC


class _OfGPT:
    @staticmethod
    def layers(model):
        return model.blocks

    @staticmethod
    def stage(model, chosen):
        first, last = 0 in chosen, len(model.blocks) - 1 in chosen
        gone = dict.fromkeys([*["embedding", "positions", "dropout"] * (not first), *["norm", "head"] * (not last)])
        stage = without(model, blocks=Some(model.blocks, chosen), **gone)
        stage.__class__, stage.is_first, stage.is_last = GPTStage, first, last
        return stage


# --- nn.Sequential ---------------------------------------------------------------------------------------------------


class _OfSequential:
    @staticmethod
    def layers(model):
        return list(model.named_children())

    @staticmethod
    def stage(model, chosen):
        layers = list(model.named_children())
        return nn.Sequential(OrderedDict(layers[i] for i in chosen)).train(model.training)


# --- Hugging Face's decoders -----------------------------------------------------------------------------------------


class NoPositions(nn.Module):
    """Stands where a decoder adds positions: a later stage's x has them already."""

    def forward(self, ids):
        return ids.new_zeros((), dtype=self.dtype)


class DecoderStage:
    """Some layers of a decoder with a language model's head, as a class before the model's own."""

    def forward(self, x, targets=None, **options):
        """Map tokens, or the x of the stage before, to x; or to the logits, or with labels to the model's mean loss.
        `options`: the model's own, as position_ids."""
        given = {"use_cache": False, **options, "input_ids" if self.is_first else "inputs_embeds": x}
        if not self.is_last:
            return getattr(self, self.base_model_prefix)(**given).last_hidden_state
        out = super().forward(**given, labels=targets)
        return out.logits if targets is None else out.loss

    @staticmethod
    def count_targets(labels):
        """Count the terms of the model's loss: it shifts labels by one, and leaves out those of −100."""
        return int((labels[..., 1:] != -100).sum())


class _OfDecoder:
    @staticmethod
    def layers(model):
        base = getattr(model, model.base_model_prefix)
        return next(child for child in base.children() if isinstance(child, nn.ModuleList))

    @classmethod
    def stage(cls, model, chosen):
        base, layers = getattr(model, model.base_model_prefix), cls.layers(model)
        first, last = 0 in chosen, len(layers) - 1 in chosen
        others = {}
        for name, child in base.named_children():
            if child is layers:
                others[name] = Some(layers, chosen)
            elif name in FRONT and not first:
                others[name] = None if child is base.get_input_embeddings() else _through(child, layers)
            elif name in BACK and not last:
                others[name] = nn.Identity()
            elif name not in (*FRONT, *BACK, *ALL):
                raise TypeError(f"{type(base).__name__} has {name}, and it is not known whether its first stage needs "
                                "that, or its last: build the stages yourself, and give PipelineParallelStage each one")
        children = {model.base_model_prefix: without(base, **others)}
        stage = without(model, **children, **{} if last else {"lm_head": None})
        stage.__class__ = type(f"{type(model).__name__}Stage", (DecoderStage, type(model)), {})
        stage.is_first, stage.is_last = first, last
        return stage


def _through(child, layers):
    """Return what stands in place of a module before the first layer."""
    if not isinstance(child, nn.Embedding):
        return nn.Identity()
    nothing = NoPositions()
    nothing.dtype = child.weight.dtype
    return nothing


def _kind(model):
    if isinstance(model, GPT):
        return _OfGPT
    if type(model) is nn.Sequential:
        return _OfSequential
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if base is not None and hasattr(model, "lm_head") and any(isinstance(c, nn.ModuleList) for c in base.children()):
        return _OfDecoder
    raise TypeError(f"the layers of {type(model).__name__} are not known: expected our GPT, an nn.Sequential, or a "
                    "decoder of Hugging Face as GPT-2 and Llama; or build the stages yourself, and give "
                    "PipelineParallelStage each one")
