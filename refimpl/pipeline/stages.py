"""A model as a run of layers, and a stage of it: our GPT, nn.Sequential, decoders of transformers.

A stage is the model itself without what other stages have. Its parameters keep the names that they have in the model,
so that the states of all stages together are the model's. It is called with the model's inputs if it is the first one,
else with the x of the one before; the last one takes targets, too, and returns the mean loss.
"""

import copy
import functools
from collections import OrderedDict

import torch
from torch import nn

from ..model import GPT
from ..others import ask


class ChosenLayers(nn.ModuleList):
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


def is_decoder(model):
    """Tell whether a model is a decoder of transformers, whose stages are made by what its class computes."""
    return isinstance(_kind(model), _DecoderLayers)


def stage_of(model, first, end):
    """Return a stage: a model's layers from `first` until before `end`, with what is before layer 0 and after the last.

    It shares the parameters of `model`, which does not change.
    """
    return part_of(model, range(first, end))


def part_of(model, chosen):
    """Return a module of some layers, of which others may be between: all that a rank of several stages has."""
    return _kind(model).stage(model, chosen)


def with_children(module, **others):
    """Return a module that shares all with `module`; `others` replaces children, or leaves those out that are None."""
    shell = copy.copy(module)
    # New dicts: copy.copy shares them, and the model would lose its children, and have the hooks of each stage.
    shell.__dict__.update({name: copy.copy(held) for name, held in vars(module).items() if isinstance(held, dict)})
    shell._modules = {name: others.get(name, child) for name, child in module._modules.items()
                      if others.get(name, child) is not None}
    return shell


# --- our GPT ---------------------------------------------------------------------------------------------------------


class GPTStage(GPT):
    """Some blocks of a GPT, with the embedding if they are the first, and the head if they are the last."""

    def forward(self, x, targets_BT=None, *, positions_BT=None):
        """Map tokens, or the x (B, T, C) of the stage before, to x; or to the logits, or the mean loss.
        `positions_BT`: as GPT takes them, where a sequence is cut over ranks."""
        _refuse_more(self, targets_BT)
        x_BTC = self.embed(x, positions_BT=positions_BT) if self.is_first else x
        rotation = self.rotation(x_BTC, positions_BT=positions_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation)
        return self.predict(x_BTC, targets_BT) if self.is_last else x_BTC


class _GPTLayers:
    @staticmethod
    def layers(model):
        return model.blocks

    @staticmethod
    def stage(model, chosen):
        first, last = 0 in chosen, len(model.blocks) - 1 in chosen
        gone = dict.fromkeys([*["embedding", "positions", "dropout"] * (not first), *["norm", "head"] * (not last)])
        stage = with_children(model, blocks=ChosenLayers(model.blocks, chosen), **gone)
        # By its class alone, so that parameters, hooks and config stay the model's.
        stage.__class__, stage.is_first, stage.is_last = GPTStage, first, last
        return stage


# --- nn.Sequential ---------------------------------------------------------------------------------------------------


class _SequentialLayers:
    @staticmethod
    def layers(model):
        return list(model.named_children())

    @staticmethod
    def stage(model, chosen):
        layers = list(model.named_children())
        return nn.Sequential(OrderedDict(layers[i] for i in chosen)).train(model.training)


# --- decoders of transformers ----------------------------------------------------------------------------------------


class LayerOfAnotherStage(nn.Module):
    """Stands where a layer of another stage is, and passes x on: layers count from 0 in each stage. It has what the
    layer has, but modules, parameters and hooks: its number, and of which kind it is."""

    def __init__(self, layer, returns):
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if name not in vars(self)})
        self.returns = returns  # how many values the layer returns; 0: x alone
        self.arrives, self.passes = None, False  # x of the stage before; whether to keep x for the next one
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        x = args[0] if args else kwargs["hidden_states"]
        if self.arrives is not None:
            x = self.arrives
        if self.passes:
            self.arrives = x
        return (x, *(None,) * (self.returns - 1)) if self.returns else x


def _refuse_more(stage, targets):
    """Raise TypeError for a second input of a stage that is not the last one: it would be taken for targets."""
    if targets is not None and not stage.is_last:
        raise TypeError(f"{type(stage).__name__}: a first stage takes tokens alone, and got {tuple(targets.shape)} "
                        "beside them: a mask or positions would not reach the later stages. Pad at the end of rows, "
                        "with targets −100")


class ModuleOfAnotherStage(nn.Module):
    """Stands where another stage computes something, and returns what it is given to compute with; of ids, a zero."""

    def forward(self, *args, **kwargs):
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        return next((x for x in given if x.dim() > 2), None) if any(x.dim() > 2 for x in given) else (
            torch.zeros((), device=given[0].device))


class DecoderStage:
    """Some layers of a decoder with a language model's head, as a class before the model's own.

    What the model does before its layers, it does in each stage; what comes of it goes unused in later ones, whose
    first layer's stand-in takes the x that has arrived. In earlier ones the last layer's hands x out.
    `shifted`: whether targets are the next tokens already, and the model's own loss is not to shift them.
    """

    shifted = False

    def forward(self, x, targets=None, **options):
        """Map tokens, or the x of the stage before, to x; or to the logits, or with labels to the model's mean loss.
        `options`: the model's own, as position_ids."""
        _refuse_more(self, targets)
        layers, given = self.get_submodule(self.anatomy.layers), {"use_cache": False, **options}
        others = [layer for layer in layers if isinstance(layer, LayerOfAnotherStage)]
        for layer in others:
            layer.calls = 0
        try:
            if self.is_first:
                given["input_ids"] = x
            else:
                layers[0].arrives = x  # what the model did before its layers goes unused
                given["inputs_embeds"] = x.new_zeros(()).expand_as(x)  # one number; who writes to it is told
            if self.is_last:
                given |= {"shift_labels": targets} if self.shifted and targets is not None else {}
                out = super().forward(**given, labels=targets)
            else:
                layers[-1].passes = True
                self.get_submodule(self.anatomy.base)(**given)
            if any(layer.calls != 1 for layer in others):
                raise RuntimeError(f"{type(self).__name__} has not called each of its {len(layers)} layers once: what "
                                   "another stage has to do would be left out, or be done twice. A model that skips "
                                   "layers (layerdrop, num_hidden_layers below its list) has no stages")
            if not self.is_last:
                return layers[-1].arrives
            return out.logits if targets is None else out.loss
        finally:
            for layer in others:
                layer.arrives, layer.passes = None, False

    def count_targets(self, labels):
        """Count the terms of the model's loss, without those of −100: a causal one shifts labels by one."""
        return int((labels[..., int(self.anatomy.shifts):] != -100).sum())


class _DecoderLayers:
    def __init__(self, anatomy):
        self.anatomy = anatomy

    def layers(self, model):
        return model.get_submodule(self.anatomy.layers)

    def stage(self, model, chosen):
        layers, anatomy = self.layers(model), self.anatomy
        if unknown := anatomy.unknown(model):
            raise TypeError(f"{type(model).__name__} has {unknown[0]}, which others of its class have not, and it is "
                            "not known whether its first stage needs that, or its last: build the stages yourself, and "
                            "give PipelineParallelStage each one")
        _refuse_changed(model, anatomy)
        first, last = 0 in chosen, len(layers) - 1 in chosen
        gone = [*anatomy.first * (not first), *anatomy.last * (not last)]
        some = nn.ModuleList(layer if i in chosen else LayerOfAnotherStage(layer, anatomy.returns)
                             for i, layer in enumerate(layers))
        others = {anatomy.layers: some, **{name: _instead(model, name) for name in gone}}
        stage = _replaced(model, others)
        stage.__class__ = _stage_class(type(model))
        stage.anatomy, stage.is_first, stage.is_last = anatomy, first, last
        return stage


def _refuse_changed(model, anatomy):
    """Raise TypeError for what somebody has put around the model or what holds its layers: each stage would do it."""
    outer = [anatomy.layers.rsplit(".", n)[0] for n in range(1, anatomy.layers.count(".") + 1)]
    for name, module in (("", model), *((name, model.get_submodule(name)) for name in outer)):
        theirs = ask("hooks", module) if not name else ()
        if theirs or "forward" in vars(module):
            has = "a hook" if theirs else "a forward of its own"
            raise TypeError(f"{name or type(model).__name__} has {has}, which each stage would run: divide the model "
                            "first, and give it to the stages that need it")


@functools.cache
def _stage_class(cls):
    return type(f"{cls.__name__}Stage", (DecoderStage, cls), {})


def _replaced(module, others, prefix=""):
    """Return a module that shares all with `module`, but for its submodules of these names."""
    children = {}
    for name, child in module.named_children():
        full = prefix + name
        if full in others:
            children[name] = others[full]
        elif any(other.startswith(f"{full}.") for other in others):
            children[name] = _replaced(child, others, f"{full}.")
    return with_children(module, **children)


def _instead(model, name):
    """Return what stands in place of a module that another stage has."""
    if "." not in name:
        return None  # the head, and what else is beside the decoder, is not called
    return ModuleOfAnotherStage()


def _kind(model):
    if isinstance(model, GPT):
        return _GPTLayers
    if type(model) is nn.Sequential:
        return _SequentialLayers
    if (anatomy := ask("blocks", model)) is not None:
        return _DecoderLayers(anatomy)
    raise TypeError(f"the layers of {type(model).__name__} are not known: expected our GPT, an nn.Sequential, or a "
                    "decoder of transformers as GPT-2 and Llama; or build the stages yourself, and give "
                    "PipelineParallelStage each one")
