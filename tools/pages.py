"""Makes all that names a page agree with data/pages.toml: file names, headings, links, "page NN", before and next, and
the line of facts below a page's title: core or elective, minutes, what it needs, what comes next.

    python tools/pages.py           rename the notebooks, and rewrite notebooks, README, docs and tests/costs.json
    python tools/pages.py --check   change nothing; say what does not agree, and exit with 1 if anything does not

A notebook has the number in its file's name until this has run, so the old number of each page is known. What only a
person can mend is said and left: a link to a page that is not there, a number of no page, a number typed in code.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from refimpl import catalog  # noqa: E402

NUMBER = r"\d\d[a-z]?\b"
LINK = r"\[(?P<text>[^\]]*)\]\((?P<folder>(?:[\w.-]+/)*)\d\d[a-z]?_(?P<linked>\w+)\.ipynb(?P<part>#[^)]*)?\)"
MENTION = rf"\b[Pp]ages\s+{NUMBER}(?:(?:,? and |,? or |, | to |–){NUMBER})*|\b[Pp]age\s+{NUMBER}"
FACTS = r"\A(# .*\n)(?:\n\*\*(?:Core|Elective)\*\* · .*\n)?"
NEIGHBOUR = r"\b(Before|Next): \[[^\]]*\]\([^)]*\)"
PROSE = ("README.md", "docs/**/*.md")
CODE = ("refimpl/**/*.*", "tests/**/*.*", "tools/**/*.py", "benchmarks/**/*.*", "examples/**/*.*", "conftest.py",
        "notebooks/exercises/**/*.py", "Makefile", "pyproject.toml", ".github/**/*.yml")
SUFFIXES = {".py", ".toml", ".c", ".html", ".yml", ""}
PAGE_COST = '"notebooks/'
TOYS = {"tests/test_pages.py"}  # numbers there are of pages of its own
OFF = 5  # minutes that a page may take more or less than the table says


class Course:
    """The table beside the files. `problems`: what only a person can mend; `changes`: {file: its text, agreeing}."""

    def __init__(self, root, pages):
        self.root, self.pages, self.problems, self.changes, self.renamed = root, pages, [], {}, {}
        self.by_slug = {page.slug: page for page in pages}
        self.files = {}
        for path in sorted(root.glob("notebooks/*.ipynb")):
            if (other := self.files.setdefault(path.stem.partition("_")[2], path)) != path:
                self.problems.append(f"notebooks/{other.name} and notebooks/{path.name} are one page: remove one")
        was = {slug: path.stem.partition("_")[0] for slug, path in self.files.items()}
        self.moved = {page.number: page.number for page in pages if page.slug not in was}
        self.moved |= {was[page.slug]: page.number for page in pages if page.slug in was}
        slugs = "|".join(sorted(self.by_slug, key=len, reverse=True))
        self.named = rf"(?<!\w)\d\d[a-z]?_(?P<slug>{slugs})(?!\w)"
        self.anything = re.compile(f"{LINK}|{self.named}|(?P<mention>{MENTION})")
        self._compare()

    def _compare(self):
        for page in self.pages:
            if page.slug not in self.files:
                self.problems.append(f"data/pages.toml has {page.slug}: there is no notebooks/{page.filename}")
        for slug, path in self.files.items():
            if slug not in self.by_slug:
                self.problems.append(f"notebooks/{path.name} is not in data/pages.toml")
            else:
                self._notebook(path, self.by_slug[slug])
        for path in (found for pattern in PROSE for found in sorted(self.root.glob(pattern))):
            self._keep(path, self.rewritten(path.read_text(encoding="utf-8"), path))
        costs = self.root / "tests" / "costs.json"
        if costs.exists():
            self._costs(costs)
        self._typed()

    def _costs(self, path):
        first, *rows, last = path.read_text(encoding="utf-8").splitlines()
        rows = [self.rewritten(row.rstrip(","), path) for row in rows]
        pages = iter(sorted(row for row in rows if row.startswith(PAGE_COST)))
        rows = [next(pages) if row.startswith(PAGE_COST) else row for row in rows]
        self._keep(path, "\n".join([first, ",\n".join(rows), last]) + "\n")

    def _keep(self, path, text):
        if text != path.read_text(encoding="utf-8"):
            self.changes[path] = text

    def rewritten(self, text, path):
        """Return `text` with the table's numbers and titles. `path`: the file that a problem is said of."""
        def agreeing(found):
            if found["mention"]:
                return re.sub(NUMBER, lambda number: self._moved(number[0], path), found["mention"])
            page = self.by_slug.get(found["linked"] or found["slug"])
            if page is None:
                self._problem(path, f"{found[0]} leads to a page that data/pages.toml does not have")
                return found[0]
            if found["slug"]:
                return page.filename.removesuffix(".ipynb")
            words = re.sub(rf"^((?:[Pp]age )?){NUMBER}$", rf"\g<1>{page.number}", found["text"])
            words = re.sub(rf"^{NUMBER} · .*$", page.name.replace("\\", r"\\"), words)
            return f"[{words}]({found['folder']}{page.filename}{found['part'] or ''})"

        return self.anything.sub(agreeing, text)

    def _moved(self, number, path):
        if number not in self.moved:
            self._problem(path, f"page {number} is none of data/pages.toml")
        return self.moved.get(number, number)

    def _problem(self, path, words):
        self.problems.append(f"{path.relative_to(self.root)}: {words}")

    # --- notebooks ---------------------------------------------------------------------------------------------------

    def _notebook(self, path, page):
        if path.name != page.filename:
            self.renamed[path] = path.with_name(page.filename)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for holder, key in texts(notebook):
            text = "".join(holder[key])
            new = self.rewritten(text, path)
            if holder.get("cell_type") == "markdown":
                new = self._neighbours(new, page)
            if holder is notebook["cells"][0]:
                new = re.sub(r"\A# .*", lambda _: f"# {page.name}", new)
                new = re.sub(FACTS, lambda found: f"{found[1]}\n{self.facts(page)}\n", new)
            if new != text:
                holder[key] = new if isinstance(holder[key], str) else new.splitlines(keepends=True)
        self._keep(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        self._expected_links(notebook, page, path)

    def _around(self, page):
        """Return {"Before": page, "Next": page}, without those that there are not."""
        at = self.pages.index(page)
        around = {"Before": self.pages[:at][-1:], "Next": self.pages[at + 1:][:1]}
        return {word: found[0] for word, found in around.items() if found}

    def facts(self, page):
        """Return the line below a page's title."""
        needs = " and ".join(f"[{each.number}]({each.filename})" for each in map(self.by_slug.get, page.needs))
        parts = ["**Core**" if page.core else "**Elective**", f"{page.minutes} minutes",
                 f"needs {needs}" if needs else "needs no other page"]
        parts += [f"next: [{page.name}]({page.filename})" for page in [self._around(page).get("Next")] if page]
        return " · ".join(parts)

    def _neighbours(self, text, page):
        around = self._around(page)
        return re.sub(NEIGHBOUR, lambda found: (
            f"{found[1]}: [{around[found[1]].name}]({around[found[1]].filename})" if found[1] in around else found[0]),
            text)

    def _expected_links(self, notebook, page, path):
        prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
        said, expected = sorted(re.findall(NEIGHBOUR, prose)), sorted(self._around(page))
        if said != expected:
            self._problem(path, f"expected one link after each of {expected}, it has them after {said}")
        taken = self._minutes(notebook, page, path, prose)
        if abs(taken - page.minutes) > OFF:
            self._problem(path, f"words, code and exercises take {taken} minutes; the table says {page.minutes}")

    def _minutes(self, notebook, page, path, prose):
        """Return what a person takes for a page, as the head of data/pages.toml has it."""
        words = len(re.sub(r"\]\([^)]*\)", "]", prose).split())
        code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
        lines = sum(bool(line.strip()) for line in code.splitlines())
        solved = 0
        for graders in (self.root / "notebooks" / folder / f"{page.slug}.py" for folder in ("exercises", "blanks")):
            text = graders.read_text(encoding="utf-8") if graders.exists() else ""
            solved += len(re.findall(r"(?m)^@(?:exercise|blank)\(", text))
        costs = self.root / "tests" / "costs.json"
        seconds = json.loads(costs.read_text()).get(f"notebooks/{path.name}", (30, 1))[0] if costs.exists() else 30
        return 5 * round((words / 100 + lines / 10 + 5 * solved + seconds / 60) / 5)

    # --- code --------------------------------------------------------------------------------------------------------

    def _typed(self):
        pattern = re.compile(rf"{self.named}|{MENTION}|notebooks/\d\d[a-z]?_?\*")
        for path in (found for glob in CODE for found in sorted(self.root.glob(glob))):
            if path.suffix in SUFFIXES and path.is_file() and str(path.relative_to(self.root)) not in TOYS:
                for at, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                    if found := pattern.search(line):
                        self._problem(path, f"line {at} names a page by its number, {found[0]!r}: name it by its slug")

    # --- what is said and done ---------------------------------------------------------------------------------------

    def differences(self):
        """Yield a line for each file that does not agree."""
        for old, new in self.renamed.items():
            yield f"notebooks/{old.name} is notebooks/{new.name} in the table"
        for path, text in self.changes.items():
            lines = zip(path.read_text(encoding="utf-8").splitlines(), text.splitlines(), strict=False)
            old, new = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
            at = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            yield (f"{path.relative_to(self.root)}: {old[max(0, at - 40):at + 40].strip()!r} does not agree with the "
                   f"table, which makes it {new[max(0, at - 40):at + 40].strip()!r}")

    def write(self):
        """Write the changed files, and rename notebooks."""
        for path, text in self.changes.items():
            path.write_text(text, encoding="utf-8")
        for old, new in self.renamed.items():
            old.rename(new)


def texts(notebook):
    """Yield (dict, key) of each text of a notebook: its cells' sources, and what their outputs show as text."""
    for cell in notebook["cells"]:
        yield cell, "source"
        for output in cell.get("outputs", ()):
            if "text" in output:
                yield output, "text"
            yield from ((output["data"], kind) for kind in output.get("data", {}) if kind.startswith("text/"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and exit with 1 if anything differs")
    chosen = parser.parse_args()
    try:
        pages = catalog.pages()
    except ValueError as error:
        parser.error(f"data/pages.toml: {error}")
    course = Course(ROOT, pages)
    differences = list(course.differences())
    if not chosen.check:
        course.write()
    print(*differences, *course.problems, sep="\n", end="\n" if differences or course.problems else "")
    return 1 if course.problems or (chosen.check and differences) else 0


if __name__ == "__main__":
    sys.exit(main())
