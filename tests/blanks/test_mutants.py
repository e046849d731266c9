"""A function that a page has its reader build is not taken for right with one small fault."""

from pathlib import Path

import pytest
from answer_mutants import accepted_blanks

SLUGS = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
               if path != Path(__file__))


@pytest.mark.nightly
@pytest.mark.parametrize("slug", SLUGS)
def test_our_own_with_a_fault_is_refused(slug, graded_here):
    found = accepted_blanks(slug, most=12)
    assert not any(found.values()), found
