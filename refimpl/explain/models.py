"""What a model is, as far as techniques ask: its repeated blocks, its heads, its MLPs, its optimizers.

Facts are numbers and names, taken while the model lives; a script's model is gone when the script has ended.
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from ..known_models.mlp import read
from ..mlp import MemoryEfficientMLP


@dataclass(frozen=True)
class ModelFacts:
    """What one model is.

    - `trained`, `frozen`: numbers of parameters. `dtypes`: {element size in bytes: parameters of it}.
    - `blocks`: paths of modules that are repeated. `mlps`: paths of MLPs whose hidden layer can be computed again.
    - `heads`: {width of the output: (width of the input, has a bias, path)} of its linear layers, the last of each.
    """

    name: str
    trained: int
    frozen: int
    dtypes: dict
    shapes: frozenset  # of parameters
    blocks: tuple
    mlps: tuple
    heads: dict

    @classmethod
    def of(cls, model, name, counted):
        """Look at a module. Paths are those of the tracker: a root is called by its class, `name`. Parameters in the
        mapping `counted` are another model's, too, and are not counted again; the rest is put into it."""
        parameters = [p for p in model.parameters() if not nn.parameter.is_lazy(p)]
        new = [p for p in parameters if p not in counted]
        dtypes = Counter()
        for parameter in new:
            counted[parameter] = None
            dtypes[parameter.element_size()] += parameter.numel()
        trained = sum(p.numel() for p in new if p.requires_grad)
        heads = {m.out_features: (m.in_features, m.bias is not None, path or name)
                 for path, m in model.named_modules() if isinstance(m, nn.Linear)}
        return cls(name, trained, sum(dtypes.values()) - trained, dict(dtypes),
                   frozenset(tuple(p.shape) for p in parameters), tuple(path for path, _ in blocks_of(model)),
                   tuple(path for path, m in model.named_modules() if _is_known_mlp(m)), heads)


@dataclass(frozen=True)
class OptimizerFacts:
    """What one optimizer is: its class, and how many numbers it keeps for each that it updates."""

    name: str
    foreach: bool

    @classmethod
    def of(cls, optimizer):
        """Look at an optimizer."""
        return cls(type(optimizer).__name__, bool(optimizer.param_groups[0].get("foreach")))


def blocks_of(model):
    """List the repeated blocks of a model: [(path, module)].

    They are the children of a ModuleList or Sequential that has two or more of one class with parameters, the outermost
    such lists. Alone, a linear layer or a norm is no block.
    """
    found, inside = [], ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in module if _is_whole(child))
            kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
            if count >= 2:
                found += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()
                          if type(child) is kind]
                inside += (f"{path}." if path else "",)
    return found


def _is_whole(module):
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _is_known_mlp(module):
    """Tell whether all that a module keeps for backward would not be kept: dropout behind its layers keeps its mask. It
    is read alone: a toy, on which `of` would try it, would take bytes of the program's."""
    try:
        return not isinstance(module, MemoryEfficientMLP) and not MemoryEfficientMLP._of(
            module, read(module), "input", None).does_more
    except TypeError:
        return False
