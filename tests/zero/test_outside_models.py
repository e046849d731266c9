"""Models that others wrote: every stage trains them as torch's DDP does, on two ranks to the bit."""

import pytest
from outside.sharded import MODELS, trained

from refimpl.comm import launch


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_stage_trains_as_ddp(name, world):
    for found in launch(trained, world, name):
        expected = found.pop("DDP")
        assert expected[0] != expected[1]
        for engine, losses in found.items():
            close = pytest.approx(expected, rel=1e-5 if world == 3 else 0, abs=0)  # DDP adds up three in another order
            assert losses == close, engine
