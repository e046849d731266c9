"""Finds what was changed in a model after its class made it of its config: a proof on a toy does not cover that."""

import copy
import re

import torch

HOME = __name__.partition(".")[0]


def changes_of(model):
    """Return a text that names the first of a model's modules that is not as its class makes it of its config: of
    another class, new or gone, with other parameters, settings, hooks or a forward of its own; None if there is none.
    What refimpl has put there does not count."""
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(model.config))  # so that it cannot change the model's own
    except Exception as error:
        return f"{type(model).__name__} cannot be made of its config again ({type(error).__name__})"
    expected = {name: _described(module) for name, module in made.named_modules()}
    for name, module in model.named_modules():
        # what refimpl has put there is proved elsewhere
        if any(HOME in type(each).__module__.split(".")[:1] for each in _path(model, name)):
            continue
        found = _described(module)
        if name not in expected:
            return f"{name}, {type(module).__name__}, is new"
        if hooked := hooks_of(module):
            return f"{name or 'the model'} has a hook, {getattr(hooked[0], '__name__', type(hooked[0]).__name__)}"
        if "forward" in vars(module) and type(module.forward).__module__.partition(".")[0] != HOME:
            return f"{name or 'the model'} has a forward of its own"
        for what in {**found, **expected[name]}:
            if found.get(what) != expected[name].get(what):
                return (f"{what} of {name or 'the model'} is {found.get(what)}, and {expected[name].get(what)} as its "
                        "class makes it")
    names = {name for name, _ in model.named_modules()}
    return next((f"{name} is gone" for name in expected if name not in names), None)


def hooks_of(module):
    """List a module's forward hooks that are neither refimpl's nor transformers', as of gradient checkpointing."""
    return [hook for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if not _is_known(hook)]


def _is_known(hook):
    of = (getattr(hook, "__module__", ""), type(hook).__module__, type(getattr(hook, "__self__", 0)).__module__)
    return any(str(name).partition(".")[0] in (HOME, "transformers") for name in of)


def _path(model, name):
    """Return the modules from the model to the one of this name."""
    return [model.get_submodule(name[:m.start()]) for m in re.finditer(r"\.|$", name)]


def _described(module):
    """Return {what: value}: its class, its parameters' shapes, and what its constructor was told, as far as it shows.
    """
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_") and value is not None
             and type(value) in (bool, int, float, str) and key != "training" and "checkpoint" not in key}
    shapes = {f"the shape of {key}": tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    return {"the class": type(module).__name__, **shapes, **plain}
