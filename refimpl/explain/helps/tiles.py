"""Attention in tiles (`refimpl.attention`): the matrices of tokens × tokens leave the recording."""

from ...attention import tiled_attention_bytes
from ...memory.records import BACKWARD, FORWARD
from ..kinds import OF_SCORES, SOFTMAXES, Kinds
from .found import Found


def tiles(replay):
    """Compute attention tile by tile."""
    kinds = Kinds(replay)
    scores = [i for i in replay.where("activations", "temporaries") if kinds[i] in OF_SCORES]
    softmaxes = [i for i in scores if replay.records[i].op in SOFTMAXES and replay.records[i].phase == FORWARD
                 and len(replay.records[i].shape) == 4]
    if not softmaxes:
        return "no scores of tokens × tokens are in memory: attention runs in tiles already, or there is none"
    spans = [replay.whole(i) for i in scores]
    for i in softmaxes:
        spans += _kept(replay, i)
    again = any(replay.records[i].op in SOFTMAXES and replay.records[i].phase == BACKWARD for i in scores)
    return Found(spans, "where blocks are recomputed, tiles and what they keep are there once more" if again else "")


def _kept(replay, i):
    """What tiled attention keeps for one softmax, and its tiles in backward."""
    B, H, T, S = replay.records[i].shape
    module, end = replay.records[i].module, int(replay.freed[i])
    after = [j for j in range(i + 1, min(i + 12, len(replay.records))) if replay.records[j].op in ("bmm", "baddbmm")
             and replay.records[j].module == module]
    if not after:
        return []
    D = int(replay.nbytes[after[0]]) // (B * H * T * 4)
    form = tiled_attention_bytes((B, H, T, D), (B, H, S, D), dropout_p=0.1 if _has_noise(replay, i) else 0.0)
    gone = B * H * T * D * 4  # dO: dense attention has let it go by then, and v for dV, which the form has
    return [(int(replay.freed[after[0]]), end, form.kept), (end - 1, end, form.peak - form.kept + gone),
            *_operands(replay, i, D)]


def _has_noise(replay, i):
    """Whether dropout draws a number for each weight, whatever its rate."""
    shape = replay.records[i].shape
    return any(record.shape == shape and record.op in ("empty_like", "native_dropout")
               for record in replay.records[i + 1 : i + 4])


def _operands(replay, i, D):
    """Dense products keep copies of q, k and v, heads of k and v repeated; tiles keep what these were made from."""
    record, born = replay.records[i], int(replay.born[i])
    begin = max((call.begin for call in replay.recording.calls if call.path == record.module
                 and call.begin < born <= call.end + 1), default=born)
    before = [j for j in range(max(0, i - 200), i) if replay.born[j] > begin and replay.nbytes[j]]
    copies = [j for j in before if replay.records[j].op == "clone" and replay.records[j].shape[-1:] == (D,)
              and replay.records[j].module == record.module and replay.records[j].saved]
    fused = [j for j in before if replay.records[j].op in ("mm", "addmm") and replay.freed[j] < replay.freed[i]
             and replay.records[j].shape[-1:] == (3 * record.shape[1] * D,)]
    if fused:
        return [*(replay.whole(j) for j in copies),
                (int(replay.freed[fused[0]]), int(replay.freed[i]), int(replay.nbytes[fused[0]]))]
    repeated = [j for j in copies if len(replay.records[j].shape) == 5]
    return [(int(replay.born[j]), int(replay.freed[j]), -int(replay.nbytes[j]) * (n - 1) // n)
            for j in repeated for n in replay.records[j].shape[2:3]]
