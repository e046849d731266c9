"""A training step in closed form: the bytes of our GPT at each moment where a step can peak.

It is exact for dense attention with all blocks kept. For fused attention, recomputation or another model, make a dry
run, or call `refimpl.sequence_length.longest_sequence`, which fits a polynomial to dry runs.
"""

from typing import TYPE_CHECKING

import torch

from .activation_bytes import activation_terms, block_terms, kept_on
from .ledger import Ledger
from .state_bytes import model_state_bytes

if TYPE_CHECKING:
    from ..config import GPTConfig

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # without master weights
DONE = ("MLP input", "GELU input", "GELU output", "SiLU input", "SiLU output", "up output", "down input",
        "projection input", "values")


def training_step_moments(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                          optimizer: str = "adamw", device: torch.device | str = "cpu") -> dict[str, Ledger]:
    """Predict the bytes of forward, backward and `optimizer.step()` at each moment that can peak: {name: Ledger}.

    These are the moments of `backward_moments`, on top of parameters, optimizer states (which exist already) and
    inputs, and

        embedding   all gradients + U, or + 2·e·vh if the head is tied: two gradients of the table and their sum
        optimizer   all gradients; Adam's own temporaries come on top, if it is not fused

    Each is exact on a CPU. In a step of few tokens another moment may be the peak (a norm, the gate, Adam's
    temporaries), a little above them. Raises ValueError as `activation_terms` and `model_state_bytes` do, and for
    dropout, a parallel residual and `post_norms`, whose backward differs.
    """
    states = step_states(config, batch, sequence, dtype, optimizer)
    gradients, wide = states["gradients"], 2 * config.vocab_size if config.tied else batch * sequence
    moments = backward_moments(config, batch, sequence, dtype, device) | {
        "embedding": Ledger(gradients=gradients, temporaries=dtype.itemsize * wide * config.hidden + 8),
        "optimizer": Ledger(gradients=gradients, temporaries=4)}
    return {name: states - {"gradients": gradients} + moment for name, moment in moments.items()}


def training_step_bytes(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                        optimizer: str = "adamw", device: torch.device | str = "cpu") -> Ledger:
    """Predict the bytes of a training step of our GPT at its peak: a Ledger, absolute.

    It is the highest of `training_step_moments`, which has the equations, and takes and raises the same: a step that is
    not the first, so the optimizer's state is there. `batch` × `sequence` tokens; `dtype` is that of the weights.
    """
    moments = training_step_moments(config, batch, sequence, dtype, optimizer, device).values()
    return max(moments, key=lambda ledger: ledger.total)


def backward_moments(config, batch, sequence, dtype=torch.float32, device="cpu", keys=None, copied=True):
    """Predict the bytes of the backward of the head and of the last block, with the gradients so far: {name: Ledger}.

    With U = e·sb·h, K = e·sb·gd, F = e·sb·f, S = e·ab·s² and V = 4·sb·v (fp32 in any precision):

        loss        all activations + 2V: the gradients of the log-probabilities and of the logits
        MLP         the blocks' activations + U + F; SwiGLU has 2F more
        softmax     the same without those of the last block's MLP, projection and values + U + K + 2S, on CUDA 3S

    `keys`: the sequence is a chunk that attends to so many keys; S = e·ab·s·keys. `copied`: it keeps a copy of them.
    """
    if config.dropout or config.parallel_residual or config.post_norms:
        raise ValueError(f"dropout={config.dropout}, parallel_residual={config.parallel_residual}, post_norms="
                         f"{config.post_norms}: this closed form covers none of them; use memory.dry_run")
    terms, block = (form(config, batch, sequence, dtype, device) for form in (activation_terms, block_terms))
    widths = config.hidden, config.kv_hidden, config.mlp_hidden
    U, K, F = (dtype.itemsize * batch * sequence * width for width in widths)
    if keys is not None:
        for name in ("softmax output", "causal mask"):
            block[name] = block[name] * keys // sequence
        K = K * keys // sequence  # of the keys that the chunk attends to, not of its own tokens alone
        block["values"], block["queries and keys"] = K * copied, U + K * copied
        terms["blocks"] = config.layers * sum(block.values())
    V, S, gated = terms["log-probabilities"], block["softmax output"], config.gated
    inside = kept_on(device, dtype.itemsize).softmax
    kept = sum(terms.values()) - terms["loss weight"]
    blocks = kept - sum(terms[name] for name in ("last norm", "head input", "log-probabilities"))
    norms = sum(nbytes for name, nbytes in block.items() if "norm" in name.lower()) // 2  # one of the block's two
    core = blocks - norms - sum(block.get(name, 0) for name in DONE)
    head, norm, up, down, out = _gradients(config, dtype.itemsize)
    waiting = head * config.tied  # a tied head's gradient, which the embedding's is added to at the end
    moments = {  # activations, gradients, temporaries; 8: the loss and its gradient
        "loss": (kept, 0, 2 * V + 8),
        "MLP": (blocks - F * gated, head + norm + down - waiting, U + F + 2 * F * gated + waiting + 8),
        "softmax": (core, head + 2 * norm + down + up + out - waiting, U + K + inside * S + waiting + 8),
    }
    return {name: Ledger(activations=a, gradients=g, temporaries=t) for name, (a, g, t) in moments.items()}


def _gradients(config, e):
    """Return the bytes of the gradients of head, norm, and a block's up (with SwiGLU's gate), down and out layers."""
    parts = config.layer_parameters()
    sizes = config.vocab_size * config.hidden, config.norm_parameters(), parts["up"], parts["down"], parts["out"]
    return [e * size for size in sizes]


def step_states(config, batch, sequence, dtype, optimizer):
    """Predict the bytes of parameters, gradients, optimizer states and inputs (int64 tokens and targets): a Ledger."""
    rotary, bias = config.positions == "rotary", config.bias
    norm = 1 + (config.norm == "layernorm" and bias)
    linear = (4 + config.gated) * (1 + bias) + (config.has_qkv_bias and not bias)
    tensors = config.layers * (linear + config.norms * norm) + norm + 3 - rotary - config.tied
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(str, PRECISIONS))}")
    states = model_state_bytes(config.parameter_count(), optimizer, PRECISIONS[dtype], tensors)
    return states + {"inputs": 2 * 8 * batch * sequence}
