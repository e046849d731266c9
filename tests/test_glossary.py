"""docs/glossary.md: each term is explained by its page, and a page that uses it before links to the glossary."""

import json
import re
from pathlib import Path

import pytest

from refimpl import catalog

ROOT = Path(__file__).parent.parent
ENTRY = r"^## (?P<term>.+)\n\n(?P<meaning>.+) Explained on \[.*\]\(\.\./notebooks/\d\d[a-z]?_(?P<slug>\w+)\.ipynb\)\.$"
ENTRIES = [found.groupdict() for found in re.finditer(ENTRY, (ROOT / "docs" / "glossary.md").read_text(), re.M)]


def markdown(page):
    cells = json.loads((ROOT / "notebooks" / page.filename).read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(page):
    """Return a page's Markdown without code, formulas, headings and links to other pages."""
    left_out = (r"```.*?```", r"\$\$.*?\$\$", r"\$[^$]*\$", r"`[^`]*`", r"!\[[^\]]*\]\([^)]*\)",
                r"\[[^\]]*\]\([^)]*\.ipynb[^)]*\)", r"(?m:^#[^\n]*$)", r"https?://\S*")
    return re.sub("|".join(left_out), "", markdown(page), flags=re.S)


def names(term, text):
    """Tell whether a text uses a term as a word, alone or in the plural."""
    return re.search(rf"(?<![\w-]){re.escape(term)}(s|es)?(?![\w-])", re.sub(r"\]\([^)]*\)", "]", text), re.I)


def test_every_entry_is_read_and_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text()
    assert len(ENTRIES) == text.count("\n## ") >= 40
    assert [each["term"] for each in ENTRIES] == sorted((each["term"] for each in ENTRIES), key=str.lower)
    assert all(len(each["meaning"].split()) <= 30 for each in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["term"])
def test_a_term_is_explained_where_it_first_stands_or_linked(entry):
    """A page explains a term by setting it in italics; the name of a function, by showing it."""
    term, anchor = entry["term"], entry["term"].lower().replace(" ", "-")
    italics = re.compile(rf"(?<!\*)\*{re.escape(term)}(s|es)?\*(?!\*)", re.I)
    link = f"](../docs/glossary.md#{anchor})"
    for page in catalog.pages():
        text = prose(page)
        if page.slug == entry["slug"]:
            shown = "_" in term and f"`{term}`" in markdown(page)
            assert shown or italics.search(text), f"{page.name} does not explain {term}, in italics"
            return
        assert not names(term, text) or link in text or italics.search(text), (
            f"{page.name} uses {term} before {entry['slug']} explains it: link it{link[1:]}")
