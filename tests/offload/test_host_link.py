"""The copies of an update on the host: two on their way at a time, and gradients are added to those that are there."""

from types import SimpleNamespace

import torch

from refimpl.comm import Link
from refimpl.offload.copies import TO_DEVICE, TO_HOST
from refimpl.offload.host_link import HostLink
from refimpl.offload.host_part import HostPart

N = 100  # elements


def copies_of(direction, seconds, count=3):
    """So many copies, each of which takes so long."""
    link = HostLink(N, Link(4 * N / seconds), locked=False)
    found = [link.start(direction, torch.zeros(N), torch.ones(N), str(i)) for i in range(count)]
    assert link.moved[direction] == count * 4 * N
    return found


def test_a_third_copy_to_the_host_begins_when_the_first_is_done():
    """Else gradients would pile up on the device; copies to the device begin at once."""
    first, *_ = copies_of(TO_HOST, 0.05)
    assert first.is_done()
    assert not any(copy.is_done() for copy in copies_of(TO_DEVICE, 100.0))


def test_gradients_of_many_parts_are_added_with_two_in_flight():
    link = HostLink(N, None, locked=False)
    parts = [HostPart(SimpleNamespace(name=str(i)), torch.zeros(N), 1.0, link) for i in range(5)]
    for micro_batch in range(3):
        for i, part in enumerate(parts):
            part.add_gradient(torch.full((N,), float(i)), first=micro_batch == 0)
    for i, part in enumerate(parts):
        part.wait_for_gradients()
        assert (part.gradient == 3 * i).all()
    assert link.host_bytes == (5 + 2) * 4 * N  # their gradients, and two that come to be added
