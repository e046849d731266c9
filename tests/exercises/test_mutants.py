"""A solution with one small fault is not taken for right."""

from pathlib import Path

import pytest
from answer_mutants import accepted

SLUGS = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
               if path != Path(__file__))


@pytest.mark.nightly
@pytest.mark.parametrize("slug", SLUGS)
def test_a_solution_with_a_fault_is_refused(slug, graded_here):
    found = accepted(slug, most=8)
    assert not any(found.values()), found
