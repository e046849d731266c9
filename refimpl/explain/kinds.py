"""What a storage is, in the words of those who do the arithmetic: logits, attention scores, copies of gradients …

Categories say who keeps a storage; these say what is in it. They are read from shapes: a row as wide as the output of
a log_softmax is a row of logits, a matrix of the shape of a softmax over keys is one of attention scores.
"""

import math

from ..common.ledger import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES
from ..memory.storage_records import BACKWARD, STEP

LOGITS = "logits"
LOG_PROBABILITIES = "log-probabilities, kept by the loss"
LOSS = "temporaries of the loss: gradients of logits and log-probabilities"
SCORES = "attention scores, tokens × tokens"
SCORE_GRADIENTS = "gradients of attention scores"
MASKS = "masks, tokens × tokens"
COPIES = "second copies of gradients"
CASTS = "16-bit casts of weights"
KEPT = "kept by your script: losses, data set, buffers, copies"
UPDATE = "temporaries of the optimizer's update"
BLOCKS = "activations of the repeated blocks"
OTHER_ACTIVATIONS = "other activations"
OTHER = "other temporaries"
SOFTMAXES = ("_softmax", "_safe_softmax")  # the second: of scaled_dot_product_attention, unfused
OF_LOSS = (LOGITS, LOG_PROBABILITIES, LOSS)
OF_SCORES = (SCORES, SCORE_GRADIENTS)
STATES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, BUFFERS, INPUTS)


class Kinds(dict):
    """Names the kind of each record of a RecordedTimeline: `kinds[i]`."""

    def __init__(self, timeline):
        super().__init__()
        self._records, self._categories = timeline.records, timeline.categories
        models, self._timeline = timeline.recording.models, timeline
        self._parameters = set().union(*(model.shapes for model in models))
        self._parameters |= {shape[::-1] for shape in self._parameters if len(shape) == 2}
        self._blocks = tuple(path for model in models for path in model.blocks)
        self._beginnings = tuple(f"{path}." for path in self._blocks)
        records = [record for i, record in enumerate(self._records) if timeline.nbytes[i]]
        masks = {self._records[i].shape[-2:] for i in timeline.recording.uses.masks if len(self._records[i].shape) > 1}
        self._masks = {shape for shape in masks if min(shape) > 1}
        self.widths = {r.shape[-1] for r in records if r.op == "_log_softmax" and len(r.shape) > 1}
        softmaxes = {tuple(r.shape) for r in records if r.op in SOFTMAXES and len(r.shape) >= 3}
        self._scores = softmaxes | {(s[0] * s[1], *s[2:]) for s in softmaxes if len(s) == 4}
        self._scores |= {(rows, 1, *s[2:]) for s in softmaxes for rows in (1, s[0]) if len(s) == 4}  # masks

    def __missing__(self, i):
        self[i] = self._kind(i)
        return self[i]

    def _kind(self, i):
        record, category = self._records[i], self._categories[i]
        if category in (INPUTS, ACTIVATIONS, TEMPORARIES) and self._is_mask(i):
            return MASKS
        if category not in (ACTIVATIONS, TEMPORARIES):
            return category
        shape = tuple(record.shape)
        if record.phase == STEP:
            return UPDATE
        if shape in self._parameters:
            named = self._like_a_parameter(record, category)
            if named:
                return named
        if self._timeline.outlives(i) or (record.born < self._timeline.window.start - 1 and category == TEMPORARIES):
            return KEPT
        at_home = record.module in self._blocks or record.module.startswith(self._beginnings)
        if len(shape) > 1 and shape[-1] in self.widths and shape not in self._parameters and not at_home:
            return _of_loss(record)
        if shape in self._scores and record.dtype != "bool":
            return SCORES if record.phase != BACKWARD else SCORE_GRADIENTS
        if category == TEMPORARIES:
            return OTHER
        return BLOCKS if at_home else OTHER_ACTIVATIONS

    def _is_mask(self, i):
        """Tell whether a storage is what attention was given as its mask, or was made on the way to it: one for all."""
        record = self._records[i]
        shape = tuple(record.shape)
        return i in self._timeline.recording.uses.masks or (
            shape[-2:] in self._masks and record.phase != BACKWARD and math.prod(shape[:-2]) == 1)

    def _like_a_parameter(self, record, category):
        if len(record.shape) < 2:
            return None
        if record.phase == BACKWARD and category == TEMPORARIES:
            return COPIES
        is_cast = record.dtype in ("float16", "bfloat16") and record.op == "_to_copy" and record.module
        return CASTS if is_cast else None  # outside of modules it is the program's own copy


def _of_loss(record):
    if record.phase == BACKWARD:
        return LOSS
    return LOG_PROBABILITIES if record.op == "_log_softmax" else LOGITS
