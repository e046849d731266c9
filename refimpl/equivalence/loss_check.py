"""A model of transformers is scored by its logits alone, once that has been held to the loss that it returns."""

import copy
import warnings

import torch
from torch.nn import functional as F

from ..others import ask
from .comparison import CannotShrink, CutDiffers
from .cut_over_ranks import first_line_of, whole_of
from .fp64 import InFP64
from .once_per_class import once


def prove_loss(model, loss_of):
    """Prove that `loss_of(model)(logits, next tokens)` is the loss that the model returns. CutDiffers if there is more
    in it, such as what balances experts. A warning if no toy of it can be made."""
    def find(model):
        with torch.enable_grad():
            toy, _, tokens, whole = whole_of(model)
            if "logits" not in whole.results:
                return
            with InFP64(), torch.no_grad():
                own = loss_of(toy)(whole.results["logits"], F.pad(tokens[:, 1:], (0, 1), value=-100))
        if not torch.isclose(own, whole.results["loss"], rtol=1e-9):
            also = "output_router_logits=True adds what balances experts: set it to False, or " if getattr(
                model.config, "output_router_logits", False) else ""
            raise CutDiffers(f"{type(model).__name__} returns a loss of {whole.results['loss']:.6f} where its logits "
                             f"alone give {own:.6f}, found on {ask('size', toy)}: {also}give together loss=, a "
                             "function (logits, targets) that is all of it")

    try:
        once("loss", model, find)
    except CannotShrink as error:
        warnings.warn(f"{type(model).__name__} is scored by its logits, and it was not checked whether its loss is "
                      f"more than that: {error}", stacklevel=3)


def shifts(toy):
    """Tell whether a model with a language model's head scores a token on the one before it, as causal ones do.
    CannotShrink for one that takes no targets for its tokens."""
    with torch.no_grad(), InFP64():
        tokens, toy = ask("tokens", toy), copy.deepcopy(toy)
        try:
            output = ask("results", toy, tokens)
        except Exception as error:  # whatever a class says of targets
            raise CannotShrink(f"a toy of {type(toy).__name__} cannot be trained: {first_line_of(error)}") from error
        own = F.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten())
    return not torch.isclose(own, output["loss"], rtol=1e-9).item()
