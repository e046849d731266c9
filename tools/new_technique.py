"""Writes the template of a technique: paper, closed form, hardened version, tests, page, blank, grader, rows.

    python tools/new_technique.py my_technique                       its page stands behind those of one device
    python tools/new_technique.py my_technique --after zero_3        behind another page

The template is a toy that is true, and its tests pass: replace it part by part (CONTRIBUTING.md). Either everything is
written, or nothing.
"""

import argparse
import json
import keyword
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "tools" / "templates" / "technique"
FILES = {"paper.py": "refimpl/papers/NAME.py", "init.py": "refimpl/NAME/__init__.py",
         "closed_forms.py": "refimpl/NAME/closed_forms.py", "technique.py": "refimpl/NAME/NAME.py",
         "test_paper.py": "tests/NAME/test_paper.py", "test_technique.py": "tests/NAME/test_NAME.py",
         "grader.py": "notebooks/exercises/NAME.py", "test_grader.py": "tests/exercises/test_NAME.py",
         "blank.py": "notebooks/blanks/NAME.py", "test_blank.py": "tests/blanks/test_NAME.py"}
ROWS = ("docs/techniques.md", "refimpl/README.md", "refimpl/papers/__init__.py", "data/pages.toml", "data/start.toml",
        "tests/core.toml", "tools/architecture.py")
FIGURES = {"0": "one_device", "1": "attention", "2": "many_ranks", "3": "the_model_split", "4": "the_allocator"}
# The page's build cells, the drawing, and the links of neighbouring pages
AGREE = ("tools/blanks.py", "tools/architecture.py", "tools/pages.py")
LONGEST = 24  # letters of a name: longer ones break lines of the templates


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", metavar="NAME", help="of the package, as in `import refimpl.NAME`")
    parser.add_argument("--after", metavar="SLUG", default="the_logits_are_the_peak",
                        help="the page before its own, by its slug in data/pages.toml (default: %(default)s)")
    chosen = parser.parse_args()
    if why := refused(chosen.name, chosen.after):
        sys.exit(why)
    for path in write(all_texts(chosen.name, chosen.after)):
        print(path.relative_to(ROOT))


def refused(name, after):
    """Say in one sentence why nothing is written; None if all is well."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f"{name!r} is no name of a package: expected lower-case letters, digits and _, as in my_technique"
    if len(name) > LONGEST:
        return f"{name} has {len(name)} letters: expected at most {LONGEST}"
    paths = [*(path.replace("NAME", name) for path in FILES.values()), f"refimpl/{name}", f"refimpl/{name}.py",
             f"tests/{name}"]
    if found := next((path for path in paths if (ROOT / path).exists()), None):
        return f"{name} exists: there is {found}"
    slugs = list(pages())
    if name in slugs:
        return f"{name} exists: data/pages.toml has a page with this slug"
    if after not in slugs[:-1]:
        return f"--after {after}: expected a page of data/pages.toml, and not the last one, as {slugs[-2]}"
    if number_after(after) is None:
        return f"--after {after}: there is no number between this page and the next one"


def pages():
    """Return {slug: page} of the table, in its order."""
    return tomllib.loads((ROOT / "data" / "pages.toml").read_text(encoding="utf-8"))


def number_after(slug):
    """Return the next number of the page's ten if it is free, else the page's number with the next letter; None if that
    is taken, too."""
    table = pages()
    before, behind = table[slug]["number"], table[list(table)[list(table).index(slug) + 1]]["number"]
    ones = f"{before[0]}{int(before[1]) + 1}"
    letter = before[:2] + chr(ord(before[2:] or "`") + 1)  # ` stands before a
    return next((each for each in (ones, letter) if before < each < behind and re.fullmatch(r"\d\d[a-z]?", each)), None)


def all_texts(name, after):
    """Return {path: its text} of all files that are written."""
    number, title = number_after(after), name.replace("_", " ").capitalize()
    page = f"{number}_{name}.ipynb"
    words = {"NAME": name, "NUMBER": number, "TITLE": title}
    texts = {ROOT / path.replace("NAME", name): sorted_imports(filled(template, words))
             for template, path in FILES.items()}
    words["PAPER"] = texts[ROOT / f"refimpl/papers/{name}.py"]
    texts[ROOT / "notebooks" / page] = notebook(filled("page.md", words))
    return texts | rows(name, after, number, title, page)


def filled(template, words):
    """Return a template with each word replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return re.sub(r"\b(test_)?(NAME|NUMBER|TITLE|PAPER)\b", lambda found: (found[1] or "") + words[found[2]], text)


def sorted_imports(text):
    """Sort neighbouring lines that import from the package: where a new name stands among them depends on it."""
    return re.sub(r"(?m)(?:^from (?:refimpl|\.)\S* import .*\n)+",
                  lambda found: "".join(sorted(found[0].splitlines(True), key=lambda line: line.split()[1])), text)


def notebook(text):
    """Return a notebook of a text in Markdown, in which a block ```python is a cell and ```out behind it what it
    prints."""
    cells = []
    for found in re.finditer(r"```python\n(.*?)```\n(?:```out\n(.*?)```\n)?|((?:(?!```python).)+)", text, re.DOTALL):
        code, printed, prose = found.groups()
        common = {"id": f"cell-{len(cells):02}", "metadata": {},
                  "source": (prose or code).strip("\n").splitlines(keepends=True)}
        if prose and prose.strip():
            cells.append({"cell_type": "markdown", **common})
        elif code:
            text = {"name": "stdout", "output_type": "stream", "text": (printed or "").splitlines(keepends=True)}
            runs = 1 + sum(each["cell_type"] == "code" for each in cells)
            cells.append({"cell_type": "code", "execution_count": runs, "outputs": [text] * bool(printed), **common})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}, "nbformat": 4,
             "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def rows(name, after, number, title, page):
    """Return {path: its text with the new row} of each table."""
    following = list(pages())[list(pages()).index(after) + 1]
    toy = "SiLU that keeps its input alone (a toy)"
    saves, costs = "of two tensors that autograd keeps, one", "a sigmoid more"
    detail = ROOT / "docs" / "techniques" / f"{FIGURES[number[0]]}.md"
    heading = toy
    anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
    technique = (f"| [{title}](techniques/{detail.name}#{anchor}) | {saves} | {costs} | "
                 f"[{number} · {title}](../notebooks/{page}) | [{name}/](../refimpl/{name}) |\n")
    figures = (f"\n## {heading}\n\n**Saves:** {saves}.\n\n**Costs:** {costs}.\n\nPage [{number} · {title}]"
               f"(../../notebooks/{page}); module [{name}/](../../refimpl/{name}).\n")
    described = (f'[{name}]\nnumber = "{number}"\ntitle = "{title}"\nquestion = "How many tensors does SiLU keep?"\n'
                 f'minutes = 20\ncore = false\nneeds = ["{after}"]\n\n')
    tests = f"{name}/test_{name}.py::test"
    core = (f'{name} = ["{tests}_numbers_are_the_plain_ones",\n{" " * (len(name) + 4)}'
            f'"{tests}_bytes_are_the_closed_form"]\n')
    places = {  # a pattern that ends where the row belongs, and the row
        "docs/techniques.md": (rf"(?s)\A.*\n\| [^\n]*\| \[{number[0]}\d[a-z]? · [^\n]*\n", technique),
        "data/start.toml": (r"(?s)\A.*(?=\]\n)", f'    ["{toy}", "{name}"],\n'),
        "refimpl/README.md": (r"(?s)## Techniques\n.*?\n(?:\| [^\n]*\n)+\|---[^\n]*\n(?:\| [^\n]*\n)+",
                              f"| [{name}]({name}/__init__.py) | {toy} |\n"),
        "refimpl/papers/__init__.py": (r'(?s)\A"""(?:[^\n]*\n)*?\n(?:    \w[^\n]*\n)+',
                                       f"    {name:<23} Hendrycks & Gimpel 2016            n for 2n numbers\n"),
        "data/pages.toml": (rf"(?s)\A.*\n(?=\[{following}\]\n)", described),
        "tests/core.toml": (r"(?s)\[techniques\].*?(?=\n\[ground\])", core),
        "tools/architecture.py": (r"TECHNIQUES = \{[^}]*(?=\})", f',\n              "{name}"')}
    return {detail: detail.read_text(encoding="utf-8") + figures,
            **{ROOT / path: with_row(path, *places[path]) for path in ROWS}}


def with_row(path, pattern, row):
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.search(pattern, text)
    if found is None:
        sys.exit(f"{path}: there is no place for a row; expected one that {pattern!r} finds")
    return text[: found.end()] + row + text[found.end():]


def write(texts):
    """Write the files and let the drawing and the pages agree with them. If anything fails, all is as it was before.
    Returns the paths of the new files and of those with a new row."""
    follow = [ROOT / "docs" / "architecture.md", ROOT / "tests" / "costs.json", *ROOT.glob("docs/*.md"),
              *ROOT.glob("notebooks/*.ipynb")]
    before = {path: path.read_bytes() if path.exists() else None for path in [*texts, *follow]}
    folders = [path for path in {path.parent for path in texts} if not path.exists()]
    try:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for tool in AGREE:
            done = subprocess.run([sys.executable, ROOT / tool], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{tool} says: {(done.stdout + done.stderr).strip()}")
    except BaseException as error:
        for path, content in before.items():
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        for folder in folders:
            folder.rmdir()
        if isinstance(error, RuntimeError):
            sys.exit(f"nothing was written: {error}")
        raise
    return list(texts)


if __name__ == "__main__":
    main()
