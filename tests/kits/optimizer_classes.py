"""Every optimizer class that torch, timm and transformers offer, with a learning rate, weight decay and momentum."""

import functools
import inspect
import logging

import outside  # noqa: F401 - before timm
import torch

OTHERS = ("kron",)  # it compiles itself, for seconds


def _classes(module):
    return {name: each for name, each in vars(module).items() if inspect.isclass(each)
            and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer}


def optimizers():
    """{name: what makes one from param groups}."""
    import timm.optim
    import transformers.optimization

    logging.getLogger("timm").setLevel(logging.ERROR)
    found = {f"torch {name}": functools.partial(each, **_known(each, momentum=0.9))
             for name, each in _classes(torch.optim).items()}
    found |= {f"transformers {name}": each for name, each in _classes(transformers.optimization).items()}
    for name in timm.optim.list_optimizers():
        info = timm.optim.get_optimizer_info(name)
        if not name.startswith(("bnb", "fused", *OTHERS)):  # those need a GPU
            known = _known(info.opt_class) | ({"momentum": 0.9} if info.has_momentum else {})
            found[f"timm {name}"] = functools.partial(timm.optim.get_optimizer_class(name), **known)
    return found


def _known(each, **more):
    given = {"lr": 0.01, "weight_decay": 0.05, **more}
    return {key: value for key, value in given.items() if key in inspect.signature(each).parameters}
