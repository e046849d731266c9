"""What a model is, as far as techniques ask: its repeated blocks, its heads, its MLPs, its optimizers.

Facts are numbers and names, taken while the model lives; a script's model is gone when the script has ended.
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from ..known_models.mlp import read
from ..mlp import MemoryEfficientMLP
from ..model import GPT
from ..others import ask


@dataclass(frozen=True)
class ModelFacts:
    """What one model is.

    - `parameters`: (number of its record, elements, bytes of each, whether it is trained) of each parameter.
    - `blocks`: paths of modules that are repeated. `mlps`: paths of MLPs whose hidden layer can be computed again.
    - `heads`: {width of the output: (width of the input, has a bias, path)} of its linear layers, the last of each.
    - `no_head`, `no_sequence`: why its loss cannot take the logits' place, why its sequences cannot be cut; "" if so.
    - `takes_attention`: whether it can be given another attention from outside.
    """

    name: str
    parameters: tuple
    shapes: frozenset  # of parameters
    blocks: tuple
    mlps: tuple
    heads: dict
    no_head: str
    no_sequence: str
    takes_attention: bool

    @classmethod
    def of(cls, model, name, counted, numbers_of):
        """Look at a module. Paths are those of the tracker: a root is called by its class, `name`. Parameters in the
        mapping `counted` are another model's, too, and are not counted again; the rest is put into it. `numbers_of`
        returns the numbers of a tensor's records."""
        parameters = [p for p in model.parameters() if not nn.parameter.is_lazy(p)]
        new = [p for p in parameters if p not in counted]
        counted.update((p, None) for p in new)
        facts = tuple((next(iter(numbers_of(p)), None), p.numel(), p.element_size(), p.requires_grad) for p in new)
        heads = {m.out_features: (m.in_features, m.bias is not None, path or name)
                 for path, m in model.named_modules() if isinstance(m, nn.Linear)}
        return cls(name, facts, frozenset(tuple(p.shape) for p in parameters),
                   tuple(path for path, _ in blocks_of(model)),
                   tuple(path for path, m in model.named_modules() if _is_known_mlp(m)), heads,
                   _refusal("head", model), _refusal("sequence", model),
                   any(hasattr(type(m), "set_attn_implementation") for m in model.modules()))


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


def _refusal(question, model):
    """Return why a technique cannot change a model from outside, "" if it can."""
    if isinstance(model, GPT):
        return ""
    try:
        return "" if ask(question, model) is not None else f"{type(model).__name__} is not of transformers"
    except (TypeError, ValueError) as error:
        return str(error).partition(":")[0]


def _is_known_mlp(module):
    """Tell whether all that a module keeps for backward would not be kept: dropout behind its layers keeps its mask. It
    is read alone: a toy, on which `of` would try it, would take bytes of the program's."""
    try:
        return not isinstance(module, MemoryEfficientMLP) and not MemoryEfficientMLP._of(
            module, read(module), "input", None).does_more
    except TypeError:
        return False
