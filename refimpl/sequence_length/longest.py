"""The longest sequence that trains within a budget, solved from closed forms: nothing is run."""

import math
from dataclasses import dataclass, field
from numbers import Real

import torch

from ..memory import Ledger
from ..memory.activation_bytes import check_sizes
from ..memory.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES, human
from .polynomial import Quadratic
from .sizes import Sizes
from .states import PRECISIONS, always, optimizer_moments
from .step import training_moments

ATTENTIONS = ("dense", "flash")


@dataclass(frozen=True)
class LongestSequence:
    """What `longest_sequence` found.

    - `sequence`: the tokens of each of `batch_size` rows. `limit`: what keeps it from being longer, "budget" or
      "context length".
    - `ledger`: the bytes of a step with it at its highest moment; `peak`, their sum, an int.
    - `moment`: which operation that is; `polynomial`: the bytes of that moment for any s, a Quadratic.
    """

    sequence: int
    batch_size: int
    budget: float
    limit: str
    moment: str
    polynomial: Quadratic
    ledger: Ledger = field(repr=False)

    @property
    def peak(self):
        """Bytes at the highest moment of the step."""
        return self.ledger.total

    def __str__(self):
        return (f"{self.batch_size} × {self.sequence:,} tokens: {human(self.peak)} of {human(int(self.budget))}, limited "
                f"by the {self.limit}\nhighest at {self.moment}: {self.polynomial} bytes")


def longest_sequence(config, budget, batch_size, *, attention="dense", recompute=False, dtype=torch.float32,
                     optimizer="adamw", multiple=64, grow=False, device="cpu"):
    """The longest sequence for which a training step of our GPT peaks within `budget` bytes: a LongestSequence.

        found = longest_sequence(GPTConfig.named("gpt2"), 16 * 2**30, batch_size=8, attention="flash")
        found.sequence, found.peak; print(found)

    The step is forward, backward, `optimizer.step()` and `zero_grad()`, when the optimizer's states are there. Each of
    its moments is a polynomial, and the least of their roots is the answer:

        a_m·s² + b_m·s + c_m ≤ budget for all m:    s = min over m of ⌊(−b_m + √(b_m² − 4a_m(c_m − budget))) / 2a_m⌋

    a_m is made of scores (e·ab of each matrix, and the causal mask), and 0 with fused attention; b_m of all other
    activations and temporaries; c_m of model states and the gradients that are there.

    - `attention`: "dense" (`softmax_attention`) or "flash" (`torch.nn.functional.scaled_dot_product_attention` in its
      fused kernel, which keeps no scores).
    - `recompute`: every block keeps its input alone, as with `refimpl.checkpointing.recompute(model.blocks)`.
    - `dtype`: of parameters, activations and optimizer states. `optimizer`: "adamw", "adam", "momentum" or "sgd".
    - `multiple`: the answer is a multiple of it.
    - `grow`: no sequence is longer than `config.context_length`, unless the model grows with it: then its context is
      the sequence, and learned positions cost h elements of parameters, gradients and states for every token.

    Exact to the byte on a CPU as `memory.track` counts, for more than one token and head, and an MLP no narrower than
    the model; workspaces of kernels and rounding of the allocator come on top. On CUDA the same operations are counted
    with what its kernels keep.

    ValueError for a budget that is no positive number of bytes or too small for the shortest sequence (the message says
    what that takes), and for options that are not known.
    """
    sequence, limit = _check(config, budget, multiple, grow), "context length"
    form = _Form(config, batch_size, attention, recompute, dtype, optimizer, grow, device)
    fits = min(total.largest(budget) for total in form.totals())
    if fits < sequence:
        sequence, limit = fits // multiple * multiple, "budget"
    if sequence < multiple:
        least = form.ledger(multiple)[0].total
        raise ValueError(f"budget={budget:,} bytes: {batch_size} × {multiple} tokens take {least:,} bytes, "
                         f"{human(least)}, the smallest feasible budget; a smaller batch_size"
                         f"{'' if recompute else ', recompute=True'} or a smaller model would take less")
    ledger, moment, polynomial = form.ledger(sequence)
    return LongestSequence(sequence, batch_size, budget, limit, moment, polynomial, ledger)


def training_step_bytes(config, batch_size, sequence, *, attention="dense", recompute=False, dtype=torch.float32,
                        optimizer="adamw", grow=False, device="cpu"):
    """Ledger (bytes) of a training step of our GPT at its highest moment; see `longest_sequence`, whose closed form
    this is. ValueError for a sequence that is no positive integer or longer than the context, and as there."""
    check_sizes(batch_size, sequence, dtype)
    if sequence > config.context_length and not grow:
        raise ValueError(f"sequence={sequence}: the context has {config.context_length} tokens; grow=True extends it")
    return _Form(config, batch_size, attention, recompute, dtype, optimizer, grow, device).ledger(sequence)[0]


class _Form:
    """The polynomials of all moments of a step."""

    def __init__(self, config, batch, attention, recompute, dtype, optimizer, grow, device):
        check_sizes(batch, 1)
        if attention not in ATTENTIONS:
            raise ValueError(f"attention={attention!r}: expected 'dense' or 'flash'")
        if dtype not in PRECISIONS:
            raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(str, PRECISIONS))}")
        flash = attention == "flash"
        if flash and config.dropout and not str(device).startswith("cuda"):
            raise ValueError(f"attention='flash' with dropout={config.dropout}: on a CPU the fused kernel has none, and "
                             "torch takes the dense one in its place; use attention='dense' or dropout=0.0")
        context = Quadratic(b=1) if grow else Quadratic(c=config.context_length)
        self.always = always(config, batch, dtype, optimizer, context)
        self.moments = training_moments(Sizes(config, batch, context, dtype, device, flash, recompute))
        self.moments += optimizer_moments(config, dtype, optimizer, context, device)

    def totals(self):
        """Of each moment, all that is alive."""
        below = sum(self.always.values(), Quadratic())
        return {below + moment.total for moment in self.moments}

    def ledger(self, s):
        """(Ledger, moment's name, its Quadratic) of the highest moment at s."""
        highest = max(self.moments, key=lambda moment: moment.total(s))
        nbytes = self.always | {ACTIVATIONS: highest.activations, GRADIENTS: highest.gradients,
                                TEMPORARIES: highest.temporaries}
        return (Ledger({name: each(s) for name, each in nbytes.items()}), highest.name,
                sum(nbytes.values(), Quadratic()))


def _check(config, budget, multiple, grow):
    """The longest sequence that the model has room for; ValueError for what is no budget or multiple."""
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < math.inf:
        raise ValueError(f"budget={budget!r}: expected bytes, a number above 0")
    if type(multiple) is not int or multiple < 1:
        raise ValueError(f"multiple={multiple!r}: expected an integer of at least 1")
    if not grow and config.context_length < multiple:
        raise ValueError(f"multiple={multiple}: the context has {config.context_length} tokens; give a smaller one, or "
                         "grow=True")
    return math.inf if grow else config.context_length // multiple * multiple
