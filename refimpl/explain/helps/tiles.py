"""Attention in tiles (`refimpl.attention`): the matrices of tokens × tokens leave the recording."""

from ...attention import tiled_attention_bytes
from ...memory.storage_records import BACKWARD, FORWARD
from ..kinds import MASKS, OF_SCORES, SOFTMAXES

SHARED = "what tiles keep of q, k and v is not counted, where keys and values are shared by heads"


def softmaxes(timeline, phase=FORWARD):
    """List the scores that are softmaxes, by head."""
    kinds = timeline.kinds
    return [i for i in timeline.where("activations", "temporaries", phase=phase) if timeline.records[i].op in SOFTMAXES
            and len(timeline.records[i].shape) == 4 and kinds[i] in OF_SCORES]


def copies(timeline):
    """List the copies of q, k and v that dense products keep."""
    return [j for i in softmaxes(timeline) for j in _copies(timeline, i)]


def sources(timeline, records):
    """Leave what tiles keep for copies: none where one product made q, k and v, which stays; else k and v as they are
    before they are repeated for the heads that share them."""
    left = {}
    for i in softmaxes(timeline):
        for j in _copies(timeline, i):
            shape, nbytes = timeline.records[j].shape, int(timeline.nbytes[j])
            left[j] = 0 if _fused(timeline, i) else nbytes // (shape[2] if len(shape) == 5 else 1)
    return [left[j] for j in records]


def products(timeline):
    """List the spans in which products that made q, k and v at once stay."""
    return [(int(timeline.freed[j]), int(timeline.freed[i]), int(timeline.nbytes[j]))
            for i in softmaxes(timeline) for j in _fused(timeline, i)[:1]]


def tiles(timeline):
    """List the spans of what tiled attention keeps for each softmax, and of its tiles in backward."""
    spans = []
    for i in softmaxes(timeline):
        (B, H, T, S), end, product = timeline.records[i].shape, int(timeline.freed[i]), _product(timeline, i)
        if product is not None:
            D = _width(timeline, i)
            form = tiled_attention_bytes((B, H, T, D), (B, H, S, D), dropout_p=0.1 if _has_noise(timeline, i) else 0.0)
            gone = B * H * T * D * 4  # dO: dense attention has let it go by then, and v for dV, which the form has
            spans += [(int(timeline.freed[product]), end, form.kept), (end - 1, end, form.peak - form.kept + gone)]
    return spans


def no_masks(timeline):
    """Say that there are no masks, if so."""
    kinds = timeline.kinds
    masks = any(kinds[i] == MASKS and timeline.nbytes[i] for i in range(len(timeline.records)))
    return "" if masks else "no mask of tokens × tokens is in memory"


def bound(timeline):
    """Say why the bytes are a bound."""
    if not any(model.takes_attention for model in timeline.recording.models):
        return "the model takes no other attention from outside: call flash_attention in it"
    if softmaxes(timeline, BACKWARD):
        return "where blocks are recomputed, tiles and what they keep are there once more"
    return SHARED if any(len(timeline.records[j].shape) == 5 for j in copies(timeline)) else ""


def copies_of_shared_heads(timeline):
    """List all copies, if that is what makes the bytes a bound."""
    return copies(timeline) if bound(timeline) == SHARED else []


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


def _fused(timeline, i):
    """List the products that made q, k and v of a softmax at once, and that dense attention lets go."""
    wide = (3 * timeline.records[i].shape[1] * _width(timeline, i),)
    return [j for j in _before(timeline, i) if timeline.records[j].op in ("mm", "addmm")
            and timeline.freed[j] < timeline.freed[i] and timeline.records[j].shape[-1:] == wide]
