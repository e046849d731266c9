"""Peaks of each step beside those of the script, of a device that counts as PyTorch's allocator does."""

import torch

from refimpl.memory.peaks import READS, RESETS, Peaks


class Device:
    def __init__(self):
        self.now = self.peak = 0

    def take(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def stats(self, index):
        both = {"all": {"current": self.now, "peak": self.peak}}
        return dict.fromkeys(("allocated_bytes", "requested_bytes", "reserved_bytes"), both)

    def reset(self, index):
        self.peak = self.now


def test_a_reading_begins_the_next_one(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for names, function in ((READS, device.stats), (RESETS, device.reset)):
        monkeypatch.setattr(torch._C, names[0], function, raising=False)
    with Peaks() as peaks:
        for nbytes in (100, 30):
            device.take(nbytes)
            device.take(-nbytes)
            assert peaks.since_the_last([0])["allocated"] == nbytes
