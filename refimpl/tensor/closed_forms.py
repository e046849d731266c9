"""What a split GPT keeps for backward and sends, in closed form: bytes and seconds of a rank in a group."""

from ..comm.texts import SAME_BYTES
from ..comm.traffic import Traffic, ring_traffic
from ..common.activation_bytes import block_terms

ON_ALL_RANKS = ("norm inputs", "norm statistics", "RMSNorm x/σ", "qkv input", "MLP input", "attention dropout mask",
                "MLP dropout mask")  # of `block_terms`: what heads and features do not cut, and tokens do
ONE_MASK = ("causal mask",)  # of T × S, for all heads of a rank


def split_block_terms(config, batch, sequence, world_size, dtype, device="cpu", *, by_tokens=False):
    """Return {term: bytes} that a rank keeps of one block for backward. `by_tokens`: with `sequence_parallel`.

        tensor parallel        norms, the inputs of qkv and MLP, two masks of dropout; the rest / N
        sequence parallel      all / N, but for the causal mask

    In 16 bits with dropout that is sbh (10 + 24/N + 5as/(hN)) and sbh (34 + 5as/h) / N, table 2 of Korthikanti et al.
    2022, if our own terms are left out. N has to divide heads, key heads, hidden sizes and tokens.
    """
    whole = ONE_MASK if by_tokens else ONE_MASK + ON_ALL_RANKS
    terms = block_terms(config, batch, sequence, dtype, device)
    return {term: nbytes if term in whole else nbytes // world_size for term, nbytes in terms.items()}


def block_traffic(config, batch, sequence, world_size, itemsize, *, by_tokens=False):
    """Return the Traffic of one block, forward and backward, on each of N = `world_size` ranks.

        tensor parallel        4 all_reduces of x: 8 (N−1)/N times its bytes
        sequence parallel      4 all_gathers and 4 reduce_scatters, and 2 all_gathers of what backward gathers again:
                               10 (N−1)/N; and an all_reduce of each weight that is whole on all ranks

    `itemsize`: bytes of a number. N has to divide the key heads; else gradients of k and v are summed, too. Shoeybi et
    al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    N = world_size
    rows = -(-batch * sequence // N) * N if by_tokens else batch * sequence
    x = rows * config.hidden * itemsize
    if not by_tokens:
        return Traffic(all_reduce=4 * ring_traffic("all_reduce", x, N))
    vector = ring_traffic("all_reduce", config.hidden * itemsize, N)
    part = ring_traffic("all_gather", x, N)  # and as many in a reduce_scatter
    return Traffic(all_gather=6 * part, reduce_scatter=4 * part, all_reduce=_whole_vectors(config) * vector)


def same_batch_traffic(world_size):
    """Return the Traffic of one forward's check that all of N = `world_size` ranks got the same batch (`same_batch`):

        16 (N−1) bytes on each rank, an all_gather of 16 bytes, once for the whole model
    """
    return Traffic(all_gather=ring_traffic("all_gather", world_size * SAME_BYTES, world_size))


def column_backward_seconds(dx, dw, reduce, gather=0.0):
    """Return (seconds, seconds of them that wait for the wire) of the backward of layers by columns.

        gather of x, beside dx = dy A        then        reduction of dx, beside dA = dyᵀ x

        max(dx, gather) + max(dw, reduce), of which dx + dw are computed

    `dx`, `dw`: seconds to compute the gradients of x and of the weights; `reduce`: of the all_reduce of dx, or of the
    reduce_scatter with `sequence_parallel`, where x is gathered again in `gather` seconds (`comm.Link.seconds`).
    """
    seconds = max(dx, gather) + max(dw, reduce)
    return seconds, seconds - dx - dw


def _whole_vectors(config):
    """Count the vectors of a block that every rank has whole: weights and biases of its norms, biases of two rows."""
    return config.norms + config.bias * (2 + config.norms * (config.norm == "layernorm"))
