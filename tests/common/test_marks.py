"""Marks: kept with a storage, told to the meters that count, and to none that does not."""

import gc

import torch

from refimpl.common import marks
from refimpl.common.marks import mark, mark_of, meters


class Meter:
    def __init__(self):
        self.told = []

    def marked(self, x):
        self.told.append(x.untyped_storage().data_ptr())


def test_a_mark_is_of_the_storage_and_ends_with_it():
    x = torch.zeros(8)
    key = x.untyped_storage()._cdata
    assert mark(x[2:], "communication") is not None and mark_of(x.untyped_storage()) == "communication"
    assert mark_of(torch.zeros(8).untyped_storage()) is None and key in marks._marks
    del x
    gc.collect()
    assert key not in marks._marks


def test_meters_are_told_while_they_count():
    x, meter = torch.zeros(8), Meter()
    meters.append(meter)
    try:
        mark(x, "gradients")
    finally:
        meters.remove(meter)
    mark(x, "parameters")
    assert meter.told == [x.untyped_storage().data_ptr()] and mark_of(x.untyped_storage()) == "parameters"
