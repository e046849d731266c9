"""Copies the pages of the course, without outputs, into a folder where a reader answers and changes them.

usage: python tools/learn.py --out learn notebooks/*.ipynb

A copy that is there is never written to. If its page has changed since it was made, the new page comes beside it, as
NAME.new.ipynb, or under its new number. A copy knows by its metadata which page it was made of, and of which version.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat

GRADERS = [Path(__file__).resolve().parents[1] / "notebooks" / name for name in ("exercises", "blanks")]
KEY = "refimpl_page"  # in a copy's metadata: the SHA-256 of the page that it was made of
SLUG = "refimpl_slug"  # the name that the page keeps when its number changes
NAME = re.compile(r"\d\d[a-z]?_(\w+)(\.new(-\d+)?)?\.ipynb")  # of a page, and of a copy that keeps the name it got


class Made(NamedTuple):
    """What a copy was made of."""

    slug: str
    hash: str


def without_outputs(page: Path) -> nbformat.NotebookNode:
    """Read a page; return it without outputs, with its slug and its hash in its metadata."""
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    content = [(cell.cell_type, cell.source) for cell in notebook.cells]
    notebook.metadata[KEY] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    notebook.metadata[SLUG] = slug_in(page.name)
    return notebook


def slug_in(name: str) -> str | None:
    """Return the slug in a copy's or a page's name; None for a name of a reader's own."""
    found = NAME.fullmatch(name)
    return found and found[1]


def made_of(copy: Path) -> Made | None:
    """Return what a copy was made of; None for a file that is no copy. Copies of version 0.1 have a hash alone."""
    try:
        metadata = json.loads(copy.read_bytes())["metadata"]
        hash, slug = metadata.get(KEY), metadata.get(SLUG) or slug_in(copy.name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Made(slug, hash) if isinstance(hash, str) and slug else None


def copies(folder: Path) -> dict[Path, Made]:
    """Return {copy: what it was made of} of the notebooks in `folder`."""
    found = {copy: made_of(copy) for copy in sorted(folder.glob("*.ipynb"))}
    return {copy: made for copy, made in found.items() if made is not None}


def copy_page(page: Path, folder: Path, there: dict[Path, Made] | None = None) -> Path | None:
    """Copy a page into `folder`, if it is not there as it is now. Return the file that was written, or None.

    `there`: what `copies(folder)` returns. A copy that the reader has given another name is theirs: it is not counted.
    """
    notebook = without_outputs(page)
    now = Made(notebook.metadata[SLUG], notebook.metadata[KEY])
    there = copies(folder) if there is None else there
    if any(made == now and slug_in(copy.name) == now.slug for copy, made in there.items()):
        return None
    copy = free_name(page, folder)
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    return copy


def free_name(page: Path, folder: Path) -> Path:
    """Return the first of NAME.ipynb, NAME.new.ipynb, NAME.new-2.ipynb, … that is not there: what is there stays."""
    for ending in ("", ".new", *(f".new-{number}" for number in range(2, 1000))):
        copy = folder / f"{page.stem}{ending}.ipynb"
        if not copy.exists():
            return copy
    raise FileExistsError(f"{folder} has 1,000 copies of {page.name}: remove those that you do not need")


def older(written: Path, there: dict[Path, Made]) -> list[str]:
    """Return a line for each file that the page just written comes beside."""
    now = made_of(written)
    lines = [f"{copy} is of this version, under another name: the page is again {written.name}" if made == now else
             f"{copy} is of an older version: the page is now {written.name}"
             for copy, made in there.items() if made.slug == now.slug]
    own = written.with_name(re.sub(r"\.new(-\d+)?\.ipynb$", ".ipynb", written.name))
    if own != written and own not in there:
        lines.append(f"{own} is no copy that was made here: the page is {written.name}")
    return lines


def reach_graders(folder: Path) -> None:
    """Let pages in `folder` import what grades their exercises and blanks, as the pages in notebooks/ do."""
    folder.mkdir(parents=True, exist_ok=True)
    for graders in GRADERS:
        link = folder / graders.name
        if not link.exists():
            link.unlink(missing_ok=True)  # of a checkout that was moved
            link.symlink_to(graders, target_is_directory=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder that the copies go into")
    chosen = parser.parse_args()
    reach_graders(chosen.out)
    there = copies(chosen.out)
    for page in chosen.pages:
        written = copy_page(page, chosen.out, there)
        if written is not None:
            print(*(f"{line}\n" for line in older(written, there)), sep="", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
