"""What a rank of a mesh holds and sends in a step, in closed form: a GPT, with ZeRO-1 and 1F1B, without dropout.

Symbols: t, c, d, p ranks of tp, cp, dp, pp; m micro-batches of b rows; T tokens of a sequence, C features, e bytes of a
number; ℓ layers of this rank's stage; x = b · T/c · C · e, the bytes that a layer reads in one micro-batch; P the bytes
of this rank's parameters; N = d · c.

    axis   a rank sends in a step                                            how often
    tp     2 (t−1)/t · x   ·  (4 + recomputed) ℓ m   + the ends              4 to 5 times in each layer and micro-batch
    pp     x               ·  (has a next stage + has one before) m          once for each micro-batch and neighbour
    dp     2 (N−1)/N · P                                                     once in a step

The ends: the first stage sums embeddings, x; the last one the gradient of the head's input, x, and of each token a
maximum and three sums in fp32. A tied weight adds an all_reduce of its gradient over two ranks of pp. A recomputed
layer sums once more: what its attention returns (the sum after the MLP is kept by nobody, and not computed again; with
`post_norms` it is, by the norm that reads it).
Narayanan et al. 2021, section 3; Shoeybi et al. 2019, section 3.
"""

from dataclasses import dataclass

import torch

from ..comm.traffic import ring_traffic
from ..common.ledger import Ledger
from ..pipeline.partition import balanced
from ..tensor.closed_forms import split_block_terms

SUMS = 4  # fp32 numbers of each token that the loss sends: a maximum, and three sums
STATES = {4: 8, 2: 12}  # bytes of Adam for a parameter of so many: two moments; in 16 bits an fp32 master, too


@dataclass(frozen=True)
class StageContents:
    """What a stage has: `layers`, and whether it is the first or the last of the model."""

    layers: int
    is_first: bool
    is_last: bool


def stage_contents(config, stages):
    """Return the StageContents of each stage. Stages have about equal parameters (`pipeline.partition`)."""
    costs = [_layer(config)] * config.layers
    costs[0] += _front(config)
    costs[-1] += _back(config)
    ends = balanced(costs, stages)
    firsts = [0, *ends[:-1]]
    return [StageContents(end - first, first == 0, end == config.layers)
            for first, end in zip(firsts, ends, strict=True)]


def stage_parameters(config, part, tp=1, *, split_only=False):
    """Return how many parameters a rank of tp has of a stage; `split_only`: of those that tp cuts."""
    norm = config.norm_parameters()
    whole = part.layers * (config.norms * norm + 2 * config.hidden * config.bias) + norm * part.is_last
    whole += config.context_length * config.hidden * (part.is_first and config.positions == "learned")
    cut = part.layers * _layer(config) + _front(config) * part.is_first + _back(config) * part.is_last - whole
    if config.tied and part.is_first and part.is_last:
        cut -= config.vocab_size * config.hidden
    return cut // tp + (0 if split_only else whole)


def axis_traffic(config, mesh, pp, rows, micro_batches, *, dtype=torch.float32, recompute=False):
    """Predict {axis: bytes} that a rank of stage `pp` sends in a step, over tp, pp and dp, without checks and padding.

    `rows`: of a place on dp. The mesh's tp has to divide heads and vocabulary, its cp the tokens; cp itself is
    `context.closed_forms`'.
    """
    part, e = stage_contents(config, mesh.pp)[pp], dtype.itemsize
    tokens = rows // micro_batches * config.context_length // mesh.cp
    x = tokens * config.hidden * e
    once = ring_traffic("all_reduce", x, mesh.tp, itemsize=e)
    sums = (4 + recompute * (1 + config.post_norms)) * part.layers + part.is_first + part.is_last
    loss = ring_traffic("all_reduce", SUMS * tokens * 4, mesh.tp, itemsize=4) * part.is_last
    neighbours = (not part.is_first) + (not part.is_last)
    tied = config.tied and mesh.pp > 1 and (part.is_first or part.is_last)
    weight = config.vocab_size // mesh.tp * config.hidden * e
    P = stage_parameters(config, part, mesh.tp) * e
    N = mesh.dp * mesh.cp
    return {"tp": micro_batches * (sums * once + loss),
            "pp": micro_batches * neighbours * x + tied * ring_traffic("all_reduce", weight, 2, itemsize=e),
            "dp": 2 * (N - 1) * P // N}


def rank_bytes(config, mesh, pp, rows, micro_batches, *, dtype=torch.float32, recompute=False):
    """Predict what a rank of stage `pp` holds of states and of layers' activations: a Ledger, of all micro-batches that
    are in flight there, min(m, p − r).

        parameters, gradients     P each
        optimizer state           8 bytes a parameter in fp32, 12 in 16 bits, over N ranks
        activations               of each layer and micro-batch in flight its input, x; not recomputed, its terms

    Beside these a rank holds one layer that is recomputed, messages, and on the last stage logits.
    """
    part, e = stage_contents(config, mesh.pp)[pp], dtype.itemsize
    count, length, b = stage_parameters(config, part, mesh.tp), config.context_length // mesh.cp, rows // micro_batches
    kept = b * length * config.hidden * e if recompute else sum(split_block_terms(config, b, length, mesh.tp,
                                                                                  dtype).values())
    return Ledger({"parameters": count * e, "gradients": count * e,
                   "optimizer state": count * STATES[e] // (mesh.dp * mesh.cp),
                   "activations": kept * part.layers * min(micro_batches, mesh.pp - pp)})


def wire_seconds(traffic, mesh, rank, per_node, inside, between):
    """Predict {axis: seconds} that `rank` needs to send {axis: bytes}, at `inside` bytes a second if all ranks of its
    group are on one node of `per_node` ranks, else at `between`: a ring is as fast as its slowest link."""
    found = {}
    for axis, nbytes in traffic.items():
        ranks = mesh.ranks(*(("dp", "cp") if axis == "dp" else (axis,)), rank=rank)
        nodes = {each // per_node for each in ranks}
        found[axis] = nbytes / (inside if len(nodes) == 1 else between)
    return found


def _layer(config):
    """Count the parameters of a layer."""
    return sum(config.layer_parameters().values())


def _front(config):
    return config.hidden * (config.vocab_size + config.context_length * (config.positions == "learned"))


def _back(config):
    return config.hidden * config.vocab_size + config.norm_parameters()
