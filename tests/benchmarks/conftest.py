"""What the tests of several benches share."""

import pytest
from rank_pool import pooled


@pytest.fixture
def run(monkeypatch):
    """A function: the settings and all rows of a bench on the CPU. The ranks of one that launches some live on."""
    def on_cpu(bench, *arguments, **options):
        if hasattr(bench, "launch"):
            monkeypatch.setattr(bench, "launch", lambda *args, device, timeout: pooled(*args, device=device))
        settings, rows = bench.run("cpu", *arguments, **options)
        return settings, list(rows)

    return on_cpu
