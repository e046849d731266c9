"""A training step in closed form: what our GPT takes at the moments where a step can be highest.

Exact for dense attention with all blocks kept. For fused attention, recomputation or another model, a dry run tells;
`refimpl.sequence_length.longest_sequence` fits those.
"""

import torch

from .activation_bytes import activation_terms, block_terms
from .ledger import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, TEMPORARIES, Ledger
from .state_bytes import model_state_bytes

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # without master weights
DONE = ("MLP input", "GELU input", "SiLU input", "SiLU output", "up output", "down input", "projection input", "values")


def training_step_moments(config, batch, sequence, dtype=torch.float32, optimizer="adamw", device="cpu"):
    """Count the bytes of forward, backward and `optimizer.step()` at each moment that can be highest: {name: Ledger}.

    Those of `backward_moments`, on top of parameters, optimizer states and inputs, and

        embedding   all gradients + U, or + 2·e·vh if the head is tied: two gradients of the table become a third
        optimizer   all gradients; Adam's own temporaries come on top, if it is not fused

    Each is exact on a CPU, so the highest is the peak or, in a step of few tokens, below it: then another moment is
    higher (a norm, the gate, Adam's temporaries). The optimizer's states are there. ValueError as in
    `activation_terms` and `model_state_bytes`, and for dropout and a parallel residual, whose backward is another.
    """
    states = step_states(config, batch, sequence, dtype, optimizer)
    moments, gradients = backward_moments(config, batch, sequence, dtype, device), states[GRADIENTS]
    wide = 2 * config.vocab_size if config.tied else batch * sequence
    moments["embedding"] = Ledger({GRADIENTS: gradients, TEMPORARIES: dtype.itemsize * wide * config.hidden + 8})
    moments["optimizer"] = Ledger({GRADIENTS: gradients, TEMPORARIES: 4})
    return {name: states - {GRADIENTS: gradients} + moment for name, moment in moments.items()}


def training_step_bytes(config, batch, sequence, dtype=torch.float32, optimizer="adamw", device="cpu"):
    """Count the bytes of a training step of our GPT at the highest of `training_step_moments`: a Ledger."""
    moments = training_step_moments(config, batch, sequence, dtype, optimizer, device).values()
    return max(moments, key=lambda ledger: ledger.total)


def backward_moments(config, batch, sequence, dtype=torch.float32, device="cpu", keys=None, copied=True):
    """Count what the backward of the head and of the last block take: {name: Ledger}, with the gradients so far.

    With U = e·sb·h, K = U·g/a, F = e·sb·f, S = e·ab·s² and V = 4·sb·v (fp32 in any precision):

        loss        all activations + 2V: the gradients of the log-probabilities and of the logits
        MLP         the blocks' activations + U + F; with SwiGLU F is there twice more
        softmax     the same without those of the last block's MLP, projection and values + U + K + 2S

    `keys`: the sequence is a chunk that attends to so many keys (then S = e·ab·s·keys), of which it keeps a copy if
    `copied`.
    """
    if config.dropout or config.parallel_residual:
        raise ValueError(f"dropout={config.dropout}, parallel_residual={config.parallel_residual}: this closed form "
                         "covers neither; use memory.dry_run")
    terms, block = (form(config, batch, sequence, dtype, device) for form in (activation_terms, block_terms))
    U, K, F = (dtype.itemsize * batch * sequence * width for width in (config.hidden, config.kv_heads * config.head_dim,
                                                                       config.mlp_hidden))
    if keys is not None:
        for name in ("softmax output", "causal mask"):
            block[name] = block[name] * keys // sequence
        K = K * keys // sequence
        block["values"], block["queries and keys"] = K * copied, U + K * copied
        terms["blocks"] = config.layers * sum(block.values())
    V, S, gated = terms["log-probabilities"], block["softmax output"], config.activation == "swiglu"
    kept = sum(terms.values()) - terms["loss weight"]
    blocks = kept - sum(terms[name] for name in ("last norm", "head input", "log-probabilities"))
    norms = sum(nbytes for name, nbytes in block.items() if "norm" in name.lower()) // 2  # one of the block's two
    core = blocks - norms - sum(block.get(name, 0) for name in DONE)
    head, norm, up, down, out = _gradients(config, dtype.itemsize)
    waiting = head * config.tied  # a tied head's gradient is no parameter's until the embedding's is there
    moments = {  # activations, gradients, temporaries; 8: the loss and its gradient
        "loss": (kept, 0, 2 * V + 8),
        "MLP": (blocks - F * gated, head + norm + down - waiting, U + F + 2 * F * gated + waiting + 8),
        "softmax": (core, head + 2 * norm + down + up + out - waiting, U + K + 2 * S + waiting + 8),
    }
    return {name: Ledger({ACTIVATIONS: a, GRADIENTS: g, TEMPORARIES: t}) for name, (a, g, t) in moments.items()}


def _gradients(config, e):
    """Bytes of the gradients of the head, a norm, and a block's up (with SwiGLU's gate), down and out projections."""
    h, f, bias, gated = config.hidden, config.mlp_hidden, config.bias, config.activation == "swiglu"
    norm = h * (1 + (config.norm == "layernorm" and bias))
    sizes = config.vocab_size * h, norm, (1 + gated) * (h * f + f * bias), f * h + h * bias, h * h + h * bias
    return [e * size for size in sizes]


def step_states(config, batch, sequence, dtype, optimizer):
    """Count parameters, gradients, optimizer states, buffers (fp32 cos and sin of rotary positions) and inputs (int64
    tokens and targets): a Ledger."""
    gated, rotary, bias = config.activation == "swiglu", config.positions == "rotary", config.bias
    norm = 1 + (config.norm == "layernorm" and bias)
    tensors = config.layers * ((4 + gated) * (1 + bias) + 2 * norm) + norm + 3 - rotary - config.tied
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(str, PRECISIONS))}")
    states = model_state_bytes(config.parameter_count(), optimizer, PRECISIONS[dtype], tensors)
    return states + {BUFFERS: 2 * 4 * config.context_length * config.rotary_dim * rotary,
                     INPUTS: 2 * 8 * batch * sequence}
