"""What tests of the meter share: the trace of a step."""

import pytest

from refimpl import memory


@pytest.fixture
def trace(trained):
    """The trace of a first step of `trained`."""
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    return t
