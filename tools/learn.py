"""Copies the pages of the course, without outputs, into a folder where a reader answers and changes them.

usage: python tools/learn.py --out learn notebooks/*.ipynb

A copy that is there is never written to. If its page has changed since it was made, the new page comes beside it, as
NAME.new.ipynb. A copy knows which page it was made of by a hash in its metadata.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import nbformat

EXERCISES = Path(__file__).resolve().parents[1] / "notebooks" / "exercises"
KEY = "refimpl_page"  # in a copy's metadata: the SHA-256 of the page that it was made of


def without_outputs(page: Path) -> nbformat.NotebookNode:
    """Read a page; return it without outputs, with its hash in its metadata."""
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    content = [(cell.cell_type, cell.source) for cell in notebook.cells]
    notebook.metadata[KEY] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return notebook


def made_of(copy: Path) -> str | None:
    """Return the hash of the page that a copy was made of; None if that is unknown."""
    try:
        return json.loads(copy.read_bytes())["metadata"].get(KEY)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def copy_page(page: Path, folder: Path) -> Path | None:
    """Copy a page into `folder`, if it is not there as it is now. Return the file that was written, or None."""
    notebook = without_outputs(page)
    for copy in (folder / page.name, folder / f"{page.stem}.new.ipynb"):
        if not copy.exists():
            folder.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, copy)
            return copy
        if made_of(copy) == notebook.metadata[KEY]:
            return None
    return numbered(notebook, page, folder)


def numbered(notebook: nbformat.NotebookNode, page: Path, folder: Path) -> Path | None:
    """Write the page as NAME.new-2.ipynb, …: an earlier NAME.new.ipynb is a reader's, too."""
    for number in range(2, 1000):
        copy = folder / f"{page.stem}.new-{number}.ipynb"
        if not copy.exists():
            nbformat.write(notebook, copy)
            return copy
        if made_of(copy) == notebook.metadata[KEY]:
            return None
    raise FileExistsError(f"{folder} has 999 copies of {page.name}: remove those that you do not need")


def reach_exercises(folder: Path) -> None:
    """Let pages in `folder` import the graders, as the pages beside notebooks/exercises do."""
    link = folder / "exercises"
    if not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # of a checkout that was moved
        link.symlink_to(EXERCISES, target_is_directory=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder that the copies go into")
    chosen = parser.parse_args()
    reach_exercises(chosen.out)
    for page in chosen.pages:
        written = copy_page(page, chosen.out)
        if written is not None and written.name != page.name:
            print(f"{page} has changed since you began {chosen.out / page.name}: the new page is {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
