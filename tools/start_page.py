"""Writes the start page of the course, INDEX.ipynb, beside a reader's copies: routes, parts, symptoms, what is solved.

usage: python tools/start_page.py learn

It is made from data/pages.toml and data/start.toml. Graders note what was solved in progress.json beside it, by page
and exercise, and have the page written anew; it has no code to run. A page whose copy is not there is not linked.
"""

import ast
import json
import platform
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from refimpl import catalog  # noqa: E402

INDEX, PROGRESS = "INDEX.ipynb", "progress.json"
SOLVED, OPEN = "☑", "☐"


def write(folder: Path) -> Path:
    """Write the start page of `folder`, if it is another than the one that is there. Returns its path."""
    path, text = folder / INDEX, json.dumps(notebook(folder), indent=1, ensure_ascii=False) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        fresh = path.with_suffix(".written")  # whole at any moment: the reader may be opening it
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    return path


def notebook(folder: Path) -> dict:
    """Return the start page as a notebook: Markdown alone."""
    course = Course(folder)
    texts = [course.head(), course.routes(), course.groups(), *course.parts()]
    cells = [{"cell_type": "markdown", "id": f"part-{n}", "metadata": {}, "source": text}
             for n, text in enumerate(texts)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    # What a kernel would write here: else JupyterLab takes the page for changed as soon as it is open, and saves it.
    language = {"codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "name": "python",
                "mimetype": "text/x-python", "nbconvert_exporter": "python", "pygments_lexer": "ipython3",
                "version": platform.python_version()}
    return {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": language}, "nbformat": 4,
            "nbformat_minor": 5}


class Course:
    """The tables of the course beside the copies in a folder."""

    def __init__(self, folder):
        self.start, self.pages = start(), {page.slug: page for page in catalog.pages()}
        self.copies, self.solved = copies_by_slug(folder), solved(folder)

    def head(self):
        """What this is, what is solved, and how to begin."""
        exercises = [(slug, name) for slug in self.pages for name in exercises_of(slug)]
        done = sum(name in self.solved.get(slug, ()) for slug, name in exercises)
        core = [page for page in self.pages.values() if page.core]
        hours = round(sum(page.minutes for page in core) / 60)
        return (f"# refimpl: which bytes were they?\n\n"
                f"{len(self.pages)} pages, each about one question. A page predicts bytes, measures them, and explains "
                f"the difference; you need no GPU. These copies are yours: answer and change what you like.\n\n"
                f"Begin with {self.link('where_the_memory_goes')}. The **core** is {len(core)} pages, about {hours} "
                f"hours with their exercises.\n\n"
                f"**{done} of {len(exercises)} exercises and blanks solved.** A grader ticks them here; open this page "
                f"again to see it.")

    def routes(self):
        """Ways through the course for a reader with one wish."""
        lines = [f"- **{route['title']}.** {route['say']}<br>"
                 + " → ".join(self.link(slug, short=True) for slug in route["pages"]) for route in self.start["routes"]]
        return "## Routes\n\n" + "\n".join(lines)

    def groups(self):
        """From what is seen to a page, by four questions."""
        text = "## From a symptom to a page\n"
        for group in self.start["groups"]:
            rows = "\n".join(symptom(row, self.link) for row in group["rows"])
            text += f"\n### {group['title']}\n\n| what you see | page |\n|---|---|\n{rows}\n"
        return text

    def parts(self):
        """Every page by its part: question, minutes, what comes before, and a box for each blank and exercise."""
        for ten, title in self.start["parts"].items():
            rows = [self.row(page) for page in self.pages.values() if page.number[0] == ten]
            if rows:
                yield (f"## {title}\n\n| page | it answers | minutes | needs | to solve |\n|---|---|---|---|---|\n"
                       + "\n".join(rows))

    def row(self, page):
        needs = ", ".join(self.pages[slug].number for slug in page.needs) or "–"
        boxes = "".join(SOLVED if name in self.solved.get(page.slug, ()) else OPEN for name in exercises_of(page.slug))
        return (f"| {self.link(page.slug)}{' · **core**' * page.core} | {page.question} | {page.minutes} | {needs} "
                f"| {boxes or '–'} |")

    def link(self, slug, short=False):
        """A page by number and title, or title alone, linked to the copy that is there."""
        page = self.pages[slug]
        words = page.title if short else page.name
        return f"[{words}]({self.copies[slug]})" if slug in self.copies else words


def symptom(row: list[str], link, between: str = ", then ") -> str:
    """Return a row of a group as a line of a table, here and in README. `link`: of a slug."""
    see, *slugs = row
    return f"| {see} | {between.join(link(slug) for slug in slugs)} |"


def in_readme(slug: str, first: bool) -> str:
    """Return README's link to a page: the first of a row with its title, others by number."""
    page = catalog.page(slug)
    return f"[{page.name if first else page.number}](notebooks/{page.filename})"


@cache
def start() -> dict:
    """Return data/start.toml. Raises ValueError for a slug that no page has, and for a page without a part."""
    found = tomllib.loads((ROOT / "data" / "start.toml").read_text(encoding="utf-8"))
    known = {page.slug for page in catalog.pages()}
    named = {slug for route in found["routes"] for slug in route["pages"]}
    named |= {slug for group in found["groups"] for _, *slugs in group["rows"] for slug in slugs}
    if named - known:
        raise ValueError(f"data/start.toml names {', '.join(sorted(named - known))}: data/pages.toml has no such page")
    if lost := [page.name for page in catalog.pages() if page.number[0] not in found["parts"]]:
        raise ValueError(f"data/start.toml has no part for {lost[0]}: add {lost[0][0]} = \"its title\" to [parts]")
    return found


@cache
def exercises_of(slug: str) -> tuple[str, ...]:
    """Return the names of what a page has its reader solve: its blanks, then its exercises."""
    found = []
    for folder, decorator in (("blanks", "blank"), ("exercises", "exercise")):
        path = ROOT / "notebooks" / folder / f"{slug}.py"
        tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        for node in tree.body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == decorator:
                    found.append(call.args[0].id if decorator == "blank" else node.name)
    return tuple(found)


def copies_by_slug(folder: Path) -> dict[str, str]:
    """Return {slug: the file name of a reader's copy}: the one under the page's own number, where there are several."""
    from learn import copies

    found = {}
    for copy, made in copies(folder).items():
        page = {each.slug: each for each in catalog.pages()}.get(made.slug)
        if page and (made.slug not in found or copy.name == page.filename):
            found[made.slug] = copy.name
    return found


def solved(folder: Path) -> dict[str, list[str]]:
    """Return {slug: names of exercises} that graders found right. What is no such file counts as nothing solved."""
    try:
        found = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {slug: [str(name) for name in names] for slug, names in found.items() if isinstance(names, list)}


def tick(folder: Path, slug: str, name: str) -> None:
    """Note that an exercise was solved, and write the start page anew."""
    found = solved(folder)
    if name not in found.setdefault(slug, []):
        found[slug].append(name)
        fresh = folder / f"{PROGRESS}.written"
        fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        fresh.replace(folder / PROGRESS)
    write(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
