"""What is alive at every moment of a step, what the optimizer takes at its end, and a step in chunks."""

from dataclasses import replace
from itertools import pairwise

import torch

from ..memory import model_state_bytes
from ..memory.ledger import BUFFERS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from .polynomial import Quadratic
from .sizes import SEQUENCE, Sizes
from .step import Moment, training_moments

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # without master weights


def parameter_sizes(config, positions):
    """Elements of each parameter of our GPT, in its order, as Quadratics; `positions` of them in that table."""
    h, f, kv, bias = config.hidden, config.mlp_hidden, config.kv_heads * config.head_dim, config.bias

    def linear(inputs, outputs):
        return [inputs * outputs] + [outputs] * bias

    norm = [h] * (1 + (config.norm == "layernorm" and bias))
    gate = linear(h, f) if config.activation == "swiglu" else []
    block = [*norm, *linear(h, h + 2 * kv), *linear(h, h), *norm, *gate, *linear(h, f), *linear(f, h)]
    table = [positions] if config.positions == "learned" else []
    head = [] if config.tied else [config.vocab_size * h]
    return [Quadratic() + n for n in [config.vocab_size * h, *table, *block * config.layers, *norm, *head]]


def always(config, batch, dtype, optimizer, context):
    """{category: Quadratic} of parameters, buffers, optimizer state, and the tokens and targets (int64).

    `context`: the model's context length, a Quadratic. ValueError for an optimizer that is not known.
    """
    sizes = parameter_sizes(config, context * config.hidden)
    each = model_state_bytes(1, optimizer, PRECISIONS[dtype])
    counters = model_state_bytes(0, optimizer, tensors=len(sizes)).total
    elements = sum(sizes, Quadratic())
    rotary = 2 * 4 * config.rotary_dim * (config.positions == "rotary")  # cos and sin, in fp32
    return {PARAMETERS: elements * each[PARAMETERS], BUFFERS: context * rotary,
            OPTIMIZER_STATE: elements * each[OPTIMIZER_STATE] + counters, INPUTS: Quadratic(b=2 * 8 * batch)}


def optimizer_moments(config, dtype, optimizer, context, device):
    """The Moments of `optimizer.step()`: all gradients are there. Adam needs √v̂ + ε beside them.

    On a CPU torch goes from parameter to parameter, with two temporaries of one while one of its predecessor is not yet
    let go; on CUDA it takes all parameters at once, with one temporary of each.
    """
    sizes = [n * dtype.itemsize for n in parameter_sizes(config, context * config.hidden)]
    gradients, loss = sum(sizes, Quadratic()), Quadratic(c=4)
    if optimizer not in ("adam", "adamw"):
        taken = [Quadratic()]
    elif str(device).startswith("cuda"):
        taken = [gradients]
    else:
        taken = {before + 2 * n for before, n in pairwise([Quadratic(), *sizes])}
    return [Moment("optimizer step", gradients=gradients, temporaries=loss + each) for each in taken]


def chunked_moments(config, batch, context, dtype, chunk, last, two=False, truncated=False, **options):
    """The Moments of forward and backward in chunks of `chunk` tokens, of which the last has `last`; `two`: there are
    no more than two. The two last chunks are the highest: the last attends to all keys, and when the one before it
    runs again all gradients are there. (The very first needs no mask of its own.)
    """
    carried = SEQUENCE * (2 * dtype.itemsize * batch * config.layers * config.kv_heads * config.head_dim)
    carried = carried * (1 if truncated else 2)
    sizes = [Sizes(config, batch, context, dtype, tokens=Quadratic(c=tokens), keys=keys, carried=True, masked=masked,
                   **options)
             for tokens, keys, masked in ((last, SEQUENCE, True), (chunk, SEQUENCE - last, not two))]
    gradients = sum(parameter_sizes(config, context * config.hidden), Quadratic()) * dtype.itemsize
    highest = [replace(moment, name=f"{moment.name}, last chunk") for moment in training_moments(sizes[0])]
    highest += [replace(moment, name=f"{moment.name}, chunk before the last", gradients=gradients)
                for moment in training_moments(sizes[1], summed=True)]
    return [replace(moment, carried=carried) for moment in highest]
