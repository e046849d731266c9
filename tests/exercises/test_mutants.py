"""A solution with one small fault is not taken for right."""

from importlib import import_module
from pathlib import Path

import pytest
from answer_mutants import accepted
from exercises_kit import NAMES

HERE = Path(__file__).parent
SLUGS = sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py") if path != Path(__file__))
MOST = 8  # faults of each solution


@pytest.fixture
def pooled_ranks(monkeypatch, slug):
    """Ranks that live on, for the graders that launch some."""
    import rank_pool

    page = import_module(f"exercises.{slug}")
    if hasattr(page, "launch"):
        monkeypatch.setattr(page, "launch", rank_pool.pooled)
    return page


@pytest.mark.nightly
@pytest.mark.parametrize("slug", SLUGS)
def test_a_solution_with_a_fault_is_refused(pooled_ranks, slug):
    found = {name: accepted(slug, name, MOST) for name in NAMES if hasattr(pooled_ranks, name)}
    assert not any(found.values()), found
