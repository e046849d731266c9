"""A device without memory: how much it gives out."""

import pytest

from refimpl.allocator.device import VirtualDevice


def test_it_gives_out_its_capacity_and_no_byte_more():
    for capacity, nbytes in ((None, 80 * 2**30), (3, 3), (1, 1)):
        device = VirtualDevice(capacity)
        assert device.malloc(nbytes + 1) is None
        assert device.malloc(nbytes) is not None and device.malloc(1) is None


def test_a_device_has_a_byte_at_least():
    with pytest.raises(ValueError, match="capacity=0: expected at least 1 byte"):
        VirtualDevice(0)
