"""The training step that an estimate tracks: the same function runs on real ranks, and dry.

A first step makes optimizer states, and lets ZeRO 3 learn in which order layers run. The second one is tracked: all
later ones are like it.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from .. import memory
from ..attention import longformer_mask, sparse
from ..checkpointing import recompute
from ..mixed_precision import MixedPrecisionOptimizer
from ..model import GPT, built_in
from ..zero import DataParallel, Zero1, Zero2, Zero3
from .model_sources import find

# Bytes of fp32 state: of a tensor (in which Adam counts its steps), and of each of its elements.
STATE = {"adamw": (4, 8), "adamw-fused": (4, 8), "adam": (4, 8), "momentum": (0, 4), "sgd": (0, 0)}
ENGINES = (DataParallel, Zero1, Zero2, Zero3)
MAKERS = {
    "adamw": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
    "adam": functools.partial(torch.optim.Adam, foreach=True),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, foreach=True),
}


class Trained(NamedTuple):
    """The trace of the second step, and of all that was allocated once the model was built; how many parameters it has;
    the bytes that another rank holds more."""

    trace: object
    whole: object
    parameters: int
    elsewhere: int


def train(comm, model, options):
    """Build `model` (as `estimate` takes it) on one rank and train it for two steps. Returns a Trained.

    `comm`: the rank's Communicator; of a plain loop it is not used. ValueError for a model without a loss, and what
    `models.find` raises.
    """
    with built_in(options.dtype, None):
        network, args, kwargs = find(model, options).build()
    network.train()
    count = sum(p.numel() for p in network.parameters())
    if not any(p.requires_grad for p in network.parameters()):
        raise ValueError(f"{model}: none of its {count:,} parameters needs a gradient: nothing would be trained")
    if options.window is not None:
        _narrow(network, options)
    if options.recompute:
        _recompute(network)
    with memory.track(network, args, kwargs) as whole:
        trained = _PlainLoop(network, options) if options.is_plain else _EngineLoop(network, comm, options)
        trained.step(args, kwargs)
        with memory.track(network, trained.optimizer, args, kwargs) as trace:
            trained.step(args, kwargs)
    return Trained(trace, whole, count, trained.elsewhere())


class _PlainLoop:
    """A loop as people write it: forward, backward, step, zero_grad."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = MAKERS[options.optimizer](parameters)
        if options.precision == "bf16-master":
            self.optimizer = MixedPrecisionOptimizer(self.optimizer)

    def step(self, args, kwargs):
        """Run one step."""
        loss = _loss(self.model, args, kwargs, self.options)
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def elsewhere(self):
        """Return 0: there is no other rank."""
        return 0


class _EngineLoop:
    """The same loop with an engine of ZeRO."""

    def __init__(self, model, comm, options):
        self.options = options
        self.engine = ENGINES[options.zero](model, comm, MAKERS[options.optimizer])
        self.optimizer = self.engine.optimizer

    def step(self, args, kwargs):
        """Run one step."""
        loss = _loss(self.engine, args, kwargs, self.options)
        self.engine.backward(loss)
        del loss
        self.engine.step()

    def elsewhere(self):
        """Return how many bytes of optimizer state the rank with most has beside this one's. Shards are equal, but for
        padding, which has no state, and an Adam counts the steps of each piece of a parameter."""
        if not self.engine.stage:
            return 0
        counter, each = STATE[self.options.optimizer]
        states = [sum(counter + each * (piece.end - piece.first) for bucket in self.engine.buckets
                      for piece in bucket.pieces(rank)) for rank in range(self.engine.comm.world_size)]
        return max(states) - states[self.engine.comm.rank]


def _loss(model, args, kwargs, options):
    region = torch.autocast("cpu", options.low) if options.precision == "autocast" else contextlib.nullcontext()
    with region:
        output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        said = type(output).__name__
        if isinstance(loss, torch.Tensor):
            said = f"tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")
        raise ValueError(f"the model returned a {said}: expected its loss, a tensor of one number that needs a "
                         "gradient, alone, first of a tuple, or as `.loss` or [\"loss\"]; let the function return a "
                         "module that computes one")
    return loss


def _narrow(model, options):
    def mask(T):
        return longformer_mask(T, options.window, min(options.global_tokens, T), causal=True)

    sparse(model, mask, kernel="tiled" if options.hardware is None else "triton")


def _recompute(model):
    if isinstance(model, GPT):
        recompute(model.blocks)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        raise ValueError(f"recompute of a {type(model).__name__}: which of its modules are blocks is not known; call "
                         "refimpl.checkpointing.recompute(model.blocks) in the function that builds it")
