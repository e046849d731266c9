"""The longest sequence that trains within a budget, solved from closed forms: nothing is run."""

import math
import sys
from dataclasses import dataclass, field
from numbers import Real

import torch

from ..memory import Ledger
from ..memory.activation_bytes import check_sizes
from ..memory.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES, human
from .cache import CARRIED
from .polynomial import Quadratic
from .sizes import Sizes
from .states import PRECISIONS, always, chunked_moments, optimizer_moments
from .step import training_moments

ATTENTIONS, GRADIENTS_OF = ("dense", "flash"), ("full", "truncated")


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
        return (f"{self.batch_size} × {self.sequence:,} tokens: {human(self.peak)} of {human(int(self.budget))}, "
                f"limited by the {self.limit}\nhighest at {self.moment}: {self.polynomial} bytes")


def longest_sequence(config, budget, batch_size, *, multiple=None, grow=False, **step):
    """The longest sequence for which a training step of our GPT peaks within `budget` bytes: a LongestSequence.

        found = longest_sequence(GPTConfig.named("gpt2"), 16 * 2**30, batch_size=8, attention="flash")
        found.sequence, found.peak; print(found)

    The step is forward, backward, `optimizer.step()` and `zero_grad()`, when the optimizer's states are there. Each of
    its moments is a polynomial, and the least of their roots is the answer:

        a_m·s² + b_m·s + c_m ≤ budget for all m:    s = min over m of ⌊(−b_m + √(b_m² − 4a_m(c_m − budget))) / 2a_m⌋

    a_m is made of scores (e·ab of each matrix, and the causal mask), and 0 with fused attention or in chunks; b_m of
    all other activations and temporaries; c_m of model states and the gradients that are there.

    - `multiple`: the answer is a multiple of it, by default 64, or `chunk_size`.
    - `grow`: no sequence is longer than `config.context_length`, unless the model grows with it: then its context is
      the sequence, and learned positions cost h elements of parameters, gradients and states for every token.
    - `step`: what the step is, in keywords; see `training_step_bytes`.

    TypeError for what is no GPTConfig. ValueError for a budget that is no positive number of bytes or too small for the
    shortest sequence (the message says what that takes), and for options that are not known.
    """
    chunk = _check_chunk(**step)
    multiple = (chunk or 64) if multiple is None else multiple
    longest, limit = _check(config, budget, multiple, grow), "context length"
    form = _Form(config, batch_size, grow, None, **step)
    if chunk is not None and multiple % chunk:
        raise ValueError(f"multiple={multiple}: expected one of chunk_size={chunk}, so that chunks are full")
    fits = form.largest(budget)
    if fits < longest:
        longest, limit = fits // multiple * multiple, "budget"
    if longest < multiple:
        least = form.ledger(multiple)[0].total
        raise ValueError(f"budget={budget:,} bytes: {batch_size} × {multiple} tokens take {least:,} bytes, "
                         f"{human(least)}, the smallest feasible budget; fewer rows, a smaller model, flash attention "
                         "or recompute=True would take less")
    ledger, moment, polynomial = form.ledger(longest)
    return LongestSequence(longest, batch_size, budget, limit, moment, polynomial, ledger)


def training_step_bytes(config, batch_size, sequence, *, grow=False, **step):
    """Ledger (bytes) of a training step of our GPT at its highest moment, the closed form of `longest_sequence`.

    `step`, in keywords:

    - `attention`: "dense" (`softmax_attention`) or "flash" (`torch.nn.functional.scaled_dot_product_attention` in its
      fused kernel, which keeps no scores).
    - `recompute`: every block keeps its input alone, as with `refimpl.checkpointing.recompute(model.blocks)`.
    - `chunk_size`: the sequence in chunks, by `ChunkedSequenceProcessor`; `gradient`: "full" or "truncated".
    - `dtype`: of parameters, activations and optimizer states. `optimizer`: "adamw", "adam", "momentum" or "sgd".
    - `device`: "cpu" or "cuda", for what its kernels keep.

    As `memory.track` counts on a CPU: exact to the byte for an MLP at least twice as wide as the model and more than
    one token and head, and within 1 % in chunks. Workspaces of kernels and rounding of the allocator come on top.

    ValueError for a sequence that is no positive integer or longer than the context (`grow`: the context grows with
    it), and for options that are not known.
    """
    check_sizes(batch_size, sequence)
    if sequence > config.context_length and not grow:
        raise ValueError(f"sequence={sequence}: the context has {config.context_length} tokens; grow=True extends it")
    chunk = _check_chunk(**step)
    last = None if chunk is None else (sequence - 1) % chunk + 1
    return _Form(config, batch_size, grow, last, **step).ledger(sequence)[0]


class _Form:
    """The polynomials of all moments of a step. `last`: the tokens of the last chunk; None: it is full."""

    def __init__(self, config, batch, grow, last, /, *, attention="dense", recompute=False, chunk_size=None,
                 gradient="full", dtype=torch.float32, optimizer="adamw", device="cpu"):
        check_sizes(batch, 1)
        for name, value, expected in (("attention", attention, ATTENTIONS), ("gradient", gradient, GRADIENTS_OF),
                                      ("dtype", dtype, PRECISIONS), ("recompute", recompute, (True, False)),
                                      ("grow", grow, (True, False))):
            if value not in expected:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")
        if attention == "flash" and config.dropout and not str(device).startswith("cuda"):
            raise ValueError(f"attention='flash' with dropout={config.dropout}: on a CPU the fused kernel has none, "
                             "torch takes the dense one in its place; use attention='dense' or dropout=0.0")
        context = Quadratic(b=1) if grow else Quadratic(c=config.context_length)
        options = {"device": device, "flash": attention == "flash", "recompute": recompute}
        self.always = always(config, batch, dtype, optimizer, context)
        step = optimizer_moments(config, dtype, optimizer, context, device)
        self.moments = {0: training_moments(Sizes(config, batch, context, dtype, **options)) + step}  # beyond s tokens
        if chunk_size is not None:
            options |= {"chunk": chunk_size, "last": last or chunk_size, "truncated": gradient == "truncated"}
            self.moments |= {chunks * chunk_size: chunked_moments(config, batch, context, dtype, two=chunks == 1,
                                                                  **options) + step for chunks in (1, 2)}

    def largest(self, budget):
        """The longest sequence that fits; −1 if none does."""
        below, longest = sum(self.always.values(), Quadratic()), -1
        ends = [*self.moments, math.inf][1:]
        for (beyond, moments), end in zip(self.moments.items(), ends, strict=True):
            fits = min((below + moment.total).largest(budget) for moment in moments)
            longest = min(fits, end) if fits > beyond else longest
        return longest

    def ledger(self, s):
        """(Ledger, moment's name, its Quadratic) of the highest moment at s."""
        moments = next(moments for beyond, moments in reversed(self.moments.items()) if s > beyond)
        highest = max(moments, key=lambda moment: moment.total(s))
        nbytes = self.always | {ACTIVATIONS: highest.activations, GRADIENTS: highest.gradients, CARRIED:
                                highest.carried, TEMPORARIES: highest.temporaries}
        return (Ledger({name: each(s) for name, each in nbytes.items()}), highest.name,
                sum(nbytes.values(), Quadratic()))


def _check_chunk(chunk_size=None, **step):
    """The size of a chunk; ValueError if it is none."""
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens, or None")
    return chunk_size


def _check(config, budget, multiple, grow):
    """The longest sequence that the model has room for; TypeError and ValueError for what is no config, budget or
    multiple."""
    if not hasattr(config, "context_length"):
        raise TypeError(f"config={config!r}: expected a GPTConfig, as GPTConfig.named('gpt2') is one")
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget <= sys.float_info.max:
        raise ValueError(f"budget={budget!r}: expected bytes, a number above 0")
    if type(multiple) is not int or multiple < 1:
        raise ValueError(f"multiple={multiple!r}: expected an integer of at least 1")
    if not grow and config.context_length < multiple:
        raise ValueError(f"multiple={multiple}: the context has {config.context_length} tokens; give a smaller one, or "
                         "grow=True")
    return math.inf if grow else config.context_length // multiple * multiple
