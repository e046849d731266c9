"""Tests of parallelism run on ranks that live on."""

import pytest
import rank_pool


@pytest.fixture(autouse=True)
def ranks_that_live_on(request, monkeypatch):
    if hasattr(request.module, "launch"):
        monkeypatch.setattr(request.module, "launch", rank_pool.pooled)
