"""Every technique of the package is in the catalogue, with a page that there is."""

from pathlib import Path

from refimpl.explain.helps import TECHNIQUES
from refimpl.explain.switch import SWITCHES

ROOT = Path(__file__).parents[2]


def test_no_technique_is_missing():
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_paper*.py")}
    rooms = rooms - {"comm"} | {"mlp", "allocator"}
    assert rooms - {technique.room for technique in TECHNIQUES} == set()
    pages = {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {technique.page for technique in TECHNIQUES} <= pages
    assert set(SWITCHES) <= {technique.name for technique in TECHNIQUES}
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)
