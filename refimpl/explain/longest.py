"""The longest batch that a script's loader has: its peak, by the peaks of shorter ones.

    bytes(L) = a + b L + c L²     rows of L tokens: projections and losses go with L, scores of attention with L²

a, b and c are those of three steps with as many rows, by the most that each has beside weights and states.
"""

import gc
import itertools
import time

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..common.ledger import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS

SECONDS = 2  # for which items are read: making them may take long
POINTS = 3  # as many lengths as there are numbers to find
STATES = PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE


def longest_item(calls, records):
    """Return (tokens, place) of the item with most `input_ids` in the data sets of the process's loaders, of those that
    SECONDS are enough for. None if models were not called on POINTS lengths, or there is no such item."""
    found, end = [], time.monotonic() + SECONDS
    if len({shape for call in calls for shape in _tokens(call, records)}) >= POINTS:
        for data in _data_sets():
            try:
                for at in itertools.takewhile(lambda at: time.monotonic() < end, range(len(data))):
                    found.append((len(data[at]["input_ids"]), at))
            except Exception:  # the script's own: it has no length, or other items
                continue
    return max(found, default=None)


def _data_sets():
    """List the data sets of the loaders that are there, or of which only the iterator is left."""
    names = {DataLoader: "dataset", _BaseDataLoaderIter: "_dataset"}
    found = [getattr(each, name) for each in gc.get_objects() for kind, name in names.items()
             if issubclass(type(each), kind)]
    return list({id(each): each for each in found}.values())


def at_the_longest(timeline):
    """Return a sentence on the peak at that item's length; None if it is no longer, or they tell too little."""
    longest, steps = timeline.recording.longest_item, _steps(timeline)
    lengths = sorted({length for length, *_ in steps})
    if longest is None or len(lengths) < POINTS or longest[0] <= lengths[-1]:
        return None
    known, nbytes, states = zip(*steps, strict=True)
    peak = round(float(fitted(known, nbytes)(longest[0]))) + states[-1]
    return (f"these batches have up to {lengths[-1]:,} tokens a row, and item {longest[1]} of a loader's data has "
            f"{longest[0]:,}: with as many rows of that length the peak would be about {peak:,} bytes")


def fitted(lengths, nbytes):
    """Return the function a + b L + c L² that fits bytes at POINTS lengths or more."""
    return np.polynomial.Polynomial.fit(lengths, nbytes, POINTS - 1)


def _steps(timeline):
    """List (tokens a row, bytes beside states, bytes of states) where the former are most, of each step with one batch
    of as many rows as the last one has."""
    found, by_category = [], timeline.trace.timeline
    of_states = np.isin(by_category.categories, STATES)
    states, others = (by_category.nbytes[:, columns].sum(axis=1) for columns in (of_states, ~of_states))
    for begin, end in timeline.steps:
        calls = [call for call in timeline.recording.calls if call.goes_back and begin <= call.begin + 1 < end]
        shapes = {shape for call in calls for shape in _tokens(call, timeline.records)}
        if len(shapes) == 1:
            at = begin + int(others[begin:end].argmax())
            found.append((*shapes.pop(), int(others[at]), int(states[at])))
    return [(length, nbytes, states) for rows, length, nbytes, states in found if rows == found[-1][0]]


def _tokens(call, records):
    """Return the shapes (rows, tokens) that a model was called on, as a set."""
    return {records[i].shape for i in call.inputs if call.depth == 1 and records[i].dtype == "int64"
            and len(records[i].shape) == 2}
