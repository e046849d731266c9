"""Tests of saving run on ranks that live on, but for those that ruin them."""

import own_disks_kit
import pytest
import rank_pool
import saving_kit


@pytest.fixture(autouse=True)
def ranks_that_live_on(request, monkeypatch):
    if hasattr(request.module, "launch") and request.path.stem != "test_manifest":
        monkeypatch.setattr(request.module, "launch", rank_pool.pooled)


@pytest.fixture
def two(tmp_path):
    """Where two hosts with two ranks each have saved step 2, each on its own disk."""
    rank_pool.pooled(lambda comm: own_disks_kit.saved(comm, 2, tmp_path, **own_disks_kit.ROWS) and None, 4)
    return tmp_path


@pytest.fixture
def expected():
    """Step 2, as one rank has it."""
    return saving_kit.alone().train(2).state_dict()
