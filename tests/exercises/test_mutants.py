"""Solutions of exercises, and our own of blanks, are not taken for right with one small fault."""

from pathlib import Path

import pytest
from answer_mutants import accepted, accepted_blanks

TESTS = Path(__file__).parents[1]
MOST = {accepted: 8, accepted_blanks: 12}  # faults of each solution


def rows():
    """Yield (what finds the faults that are taken for right, slug) for each table of answers."""
    for folder, find in (("exercises", accepted), ("blanks", accepted_blanks)):
        for path in sorted((TESTS / folder).glob("test_*.py")):
            if path != Path(__file__):
                slug = path.stem.removeprefix("test_")
                yield pytest.param(find, slug, id=f"{folder}-{slug}")


@pytest.mark.nightly
@pytest.mark.parametrize(("find", "slug"), list(rows()))
def test_a_solution_with_a_fault_is_refused(find, slug, graded_here):
    found = find(slug, most=MOST[find])
    assert not any(found.values()), found
