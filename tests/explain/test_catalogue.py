"""Every technique of the package is in the catalogue, with a page that there is."""

import re
from pathlib import Path

from refimpl import catalog
from refimpl.explain.helps import TECHNIQUES
from refimpl.explain.switch import SWITCHES

ROOT = Path(__file__).parents[2]


def test_no_technique_is_missing():
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_paper*.py")}
    rooms = rooms - {"comm"} | {"mlp", "allocator"}
    assert rooms - {technique.room for technique in TECHNIQUES} == set()
    assert all(catalog.page(technique.page).number for technique in TECHNIQUES)
    assert set(SWITCHES) <= {technique.name for technique in TECHNIQUES}
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)


def test_the_rows_that_the_readme_prints_have_the_number_of_their_page():
    readme, found = (ROOT / "README.md").read_text(), 0
    for technique in TECHNIQUES:
        for row in re.findall(rf"%  {re.escape(technique.title)}  +{re.escape(technique.cost)}  +(\S+)", readme):
            assert row == catalog.page(technique.page).number
            found += 1
    assert found >= 3
