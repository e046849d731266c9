"""Tests of ZeRO run on ranks that live on, but for those that ruin them or change what they run on."""

import pytest
import rank_pool


@pytest.fixture(autouse=True)
def ranks_that_live_on(request, monkeypatch):
    if hasattr(request.module, "launch") and request.path.stem not in ("test_faults", "test_retries"):
        monkeypatch.setattr(request.module, "launch", rank_pool.pooled)
