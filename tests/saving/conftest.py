"""Tests of saving run on ranks that live on, but for those that ruin them."""

import pytest
import rank_pool


@pytest.fixture(autouse=True)
def ranks_that_live_on(request, monkeypatch):
    if hasattr(request.module, "launch") and request.path.stem != "test_manifest":
        monkeypatch.setattr(request.module, "launch", rank_pool.pooled)
