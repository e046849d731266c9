"""Models that others wrote: every stage trains them as torch's DDP does, on two ranks to the bit."""

import pytest
from outside.sharded import MODELS, dropping_layers, trained

from refimpl.comm import CollectiveMismatch, launch


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_stage_trains_as_ddp(name, world):
    for found in launch(trained, world, name):
        expected = found.pop("DDP")
        assert expected[0] != expected[1]
        for engine, losses in found.items():
            close = pytest.approx(expected, rel=1e-5 if world == 3 else 0, abs=0)  # DDP adds up three in another order
            assert losses == close, engine


def test_ranks_that_drop_other_layers_are_named_with_both_orders():
    with pytest.raises(CollectiveMismatch, match="rank 1 began other collectives than rank 0") as caught:
        launch(dropping_layers, 2, timeout=20)
    assert "all_gather of model.decoder.layers." in str(caught.value)
