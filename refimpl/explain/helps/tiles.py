"""Attention in tiles (`refimpl.attention`): the matrices of tokens × tokens leave the recording."""

from ...attention import tiled_attention_bytes
from ...memory.storage_records import BACKWARD, FORWARD
from ..kinds import OF_SCORES, SOFTMAXES, Kinds
from .found import LOOSE, Found


def tiles(timeline):
    """Compute attention tile by tile."""
    kinds = Kinds(timeline)
    scores = [i for i in timeline.where("activations", "temporaries") if kinds[i] in OF_SCORES]
    softmaxes = [i for i in scores if timeline.records[i].op in SOFTMAXES and timeline.records[i].phase == FORWARD
                 and len(timeline.records[i].shape) == 4]
    if not softmaxes:
        return "no scores of tokens × tokens are in memory: attention runs in tiles already, or there is none"
    gone = [timeline.whole(i) for i in scores] + [span for i in softmaxes for span in _kept(timeline, i)]
    spans = gone + [span for i in softmaxes for span in _operands(timeline, i)]
    if not any(model.takes_attention for model in timeline.recording.models):
        return Found(spans, "the model takes no other attention from outside: call flash_attention in it")
    again = any(timeline.records[i].op in SOFTMAXES and timeline.records[i].phase == BACKWARD for i in scores)
    if again:
        return Found(spans, "where blocks are recomputed, tiles and what they keep are there once more")
    copies = [j for i in softmaxes for j in _copies(timeline, i)]
    if any(len(timeline.records[j].shape) == 5 for j in copies):
        most = gone + [timeline.whole(j) for j in copies]
        return Found(most, "what tiles keep of q, k and v is not counted, where keys and values are shared by heads",
                     timeline.saved(most) > LOOSE * timeline.saved(spans))
    return Found(spans)


def _kept(timeline, i):
    """What tiled attention keeps for one softmax, and its tiles in backward."""
    (B, H, T, S), end, product = timeline.records[i].shape, int(timeline.freed[i]), _product(timeline, i)
    if product is None:
        return []
    D = _width(timeline, i)
    form = tiled_attention_bytes((B, H, T, D), (B, H, S, D), dropout_p=0.1 if _has_noise(timeline, i) else 0.0)
    gone = B * H * T * D * 4  # dO: dense attention has let it go by then, and v for dV, which the form has
    return [(int(timeline.freed[product]), end, form.kept), (end - 1, end, form.peak - form.kept + gone)]


def _product(timeline, i):
    """Return the record of a softmax's product with v; None if there is none near."""
    module = timeline.records[i].module
    return next((j for j in range(i + 1, min(i + 12, len(timeline.records)))
                 if timeline.records[j].op in ("bmm", "baddbmm") and timeline.records[j].module == module), None)


def _width(timeline, i):
    """Return the elements of a row of v, 0 where the product with v is not known."""
    (B, H, T, _), product = timeline.records[i].shape, _product(timeline, i)
    return 0 if product is None else int(timeline.nbytes[product]) // (B * H * T * 4)


def _has_noise(timeline, i):
    """Whether dropout draws a number for each weight, whatever its rate."""
    shape = timeline.records[i].shape
    return any(record.shape == shape and record.op in ("empty_like", "native_dropout")
               for record in timeline.records[i + 1 : i + 4])


def _before(timeline, i):
    """List the records that the same call of a module made before a softmax."""
    record, born = timeline.records[i], int(timeline.born[i])
    begin = max((call.begin for call in timeline.recording.calls if call.path == record.module
                 and call.begin < born <= call.end + 1), default=born)
    return [j for j in range(max(0, i - 200), i) if timeline.born[j] > begin and timeline.nbytes[j]]


def _copies(timeline, i):
    """List the copies of q, k and v that the dense products of a softmax keep."""
    record, D = timeline.records[i], _width(timeline, i)
    return [j for j in _before(timeline, i) if timeline.records[j].op == "clone" and timeline.records[j].saved
            and timeline.records[j].shape[-1:] == (D,) and timeline.records[j].module == record.module]


def _operands(timeline, i):
    """Dense products keep copies of q, k and v, heads of k and v repeated; tiles keep what these were made from."""
    record, copies, D = timeline.records[i], _copies(timeline, i), _width(timeline, i)
    fused = [j for j in _before(timeline, i) if timeline.records[j].op in ("mm", "addmm")
             and timeline.freed[j] < timeline.freed[i]
             and timeline.records[j].shape[-1:] == (3 * record.shape[1] * D,)]
    if fused:
        return [*(timeline.whole(j) for j in copies),
                (int(timeline.freed[fused[0]]), int(timeline.freed[i]), int(timeline.nbytes[fused[0]]))]
    repeated = [j for j in copies if len(timeline.records[j].shape) == 5]
    return [(int(timeline.born[j]), int(timeline.freed[j]), -int(timeline.nbytes[j]) * (n - 1) // n)
            for j in repeated for n in timeline.records[j].shape[2:3]]
