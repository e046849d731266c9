"""Which tests and pages a tier runs: a draw of fixed size, from what each has cost (tests/costs.json).

`make test`, on a push, and `make test-all` run for so many seconds as pyproject.toml gives them (`[tool.refimpl.push]`,
`[tool.refimpl.all]`), however many tests there are: a new capability takes its share from the others' by a new draw.
`make test-matrix` runs every case.
- The tests of the part `core` are always drawn, and a case of each function without a cost, as new ones are. Of those
  held against the clock (`alone`), a package has one. Where `each` is true, a case of every function is drawn, and all
  that is held against the clock.
- Of the others the cheap ones come before the dear ones, wherever they are, and a function's second case counts as
  twice as dear as its first, its third as three times: so many functions are drawn, and many cases of cheap ones.
  The cases of a matrix come in the order of a covering array: few rows that hold each pair of two arguments' values.
  The sample stays the same until the seed, the costs or the tests change.
- Tests marked `nightly` are drawn where `each` is true alone.
- Pages run whole. If not all fit, those that the file calls core do, and others by turns, from commit to commit; where
  `each` is true, all do.
"""

import random
import subprocess
from collections import defaultdict
from itertools import accumulate

from allpairspy import AllPairs

UNKNOWN = 1.0  # seconds of a case of a function that has no cost yet: new, or under another name
CHEAP = 1.0  # seconds: a function that takes less in all needs no covering array
STRIDE = 7  # pages from one commit's first to the next one's


def function_of(item):
    """The id of an item's test function, for all its cases; of a cell, its page."""
    return item.nodeid.partition("::")[0] if is_of_a_page(item) else item.nodeid.partition("[")[0]


def is_of_a_page(item):
    return item.path.suffix == ".ipynb"


def drawn(items, costs, settings, turn, workers=2):
    """The items that a tier runs, in their order. `costs`: {function: [seconds, cases]}; `turn`: the number of commits,
    by which pages take turns; `workers`: processes that share the items."""
    tests, pages = defaultdict(list), defaultdict(list)
    for item in items:
        if settings["each"] or not item.get_closest_marker("nightly"):
            (pages if is_of_a_page(item) else tests)[function_of(item)].append(item)
    chosen = {id(item) for item in tests_drawn(tests, costs, settings["tests"] * workers, settings)}
    if settings["each"]:
        kept = pages
    else:
        kept = pages_drawn(pages, costs, settings["pages"] * workers, settings["core_pages"], turn)
    chosen |= {id(item) for page in kept for item in pages[page]}
    return [item for item in items if id(item) in chosen]


# --- tests -----------------------------------------------------------------------------------------------------------


def tests_drawn(functions, costs, seconds, settings):
    """Items of {function: its cases} that take so many seconds together."""
    chosen, left = [], seconds
    for seconds_of, item, always in in_order(functions, costs, settings):
        if always or seconds_of <= left:
            chosen.append(item)
            left -= seconds_of
    return chosen


def in_order(functions, costs, settings):
    """List (seconds, item, whether it is drawn in any case) of all functions, in the order of their draw."""
    clocks = {}  # package -> its cheapest function that is held against the clock
    for name, cases in functions.items():
        if cases[0].get_closest_marker("alone"):
            clocks.setdefault(package_of(name), []).append((seconds_of_a_case(name, cases, costs), name))
    clocks = {package: min(found)[1] for package, found in clocks.items()}
    found, chance = [], random.Random(settings["seed"])
    for name, cases in chance.sample(sorted(functions.items()), len(functions)):  # of equals no package is preferred
        seconds = seconds_of_a_case(name, cases, costs)
        if cases[0].get_closest_marker("alone"):
            kept = cases if settings["each"] else cases[:1] if name == clocks[package_of(name)] else []
            found += [(0, seconds, item, True) for item in kept]
            continue
        for nth, item in enumerate(covering(cases, f"{settings['seed']} {name}", seconds)):
            always = item.get_closest_marker("core") is not None or nth == 0 and (settings["each"] or name not in costs)
            found.append((0 if always else seconds * (nth + 1), seconds, item, always))
    return [each[1:] for each in sorted(found, key=lambda each: each[0])]


def package_of(name):
    """The folder of tests/ that a function is in."""
    return "/".join(name.partition("::")[0].split("/")[:-1][:2])


def seconds_of_a_case(name, cases, costs):
    """What one case of a function took on average, the last time that all were run."""
    seconds, measured = costs.get(name, (UNKNOWN * len(cases), len(cases)))
    return max(seconds / measured, 0.001)


def covering(cases, seed, seconds=CHEAP):
    """The cases of a function, those first that together hold each pair of two arguments' values; the rest, and all
    cases of a cheap function, by chance."""
    chance = random.Random(seed)
    shuffled = chance.sample(cases, len(cases))
    columns = columns_of(cases)
    if len(columns) < 2 or seconds * len(cases) < CHEAP:
        return shuffled
    by_row = dict(zip(zip(*columns, strict=True), cases, strict=True))
    begun = {part for row in by_row for part in accumulate((value,) for value in row)}
    values = [chance.sample(sorted(set(column)), len(set(column))) for column in columns]
    rows = AllPairs(values, filter_func=lambda row: tuple(row) in begun)
    first = [by_row[tuple(row)] for row in rows]
    taken = set(map(id, first))
    return first + [item for item in shuffled if id(item) not in taken]


def columns_of(cases):
    """Columns of numbers, one for each argument that is varied on its own: which of its values each case has."""
    if not hasattr(cases[0], "callspec"):
        return []
    names = cases[0].callspec.indices
    columns = {tuple(case.callspec.indices.get(name, 0) for case in cases) for name in names}
    return sorted(column for column in columns if len(set(column)) > 1)


# --- pages -----------------------------------------------------------------------------------------------------------


def pages_drawn(pages, costs, seconds, core, turn):
    """Names of pages that take so many seconds together; if not all do, the core ones, and others from `turn` on.

    `core`: slugs, of what a name has after its number."""
    seconds_of = {page: costs.get(page, (15.0, 1))[0] for page in pages}
    if sum(seconds_of.values()) <= seconds:
        return list(pages)
    chosen = [page for page in pages if page.removesuffix(".ipynb").partition("_")[2] in core]
    left = seconds - sum(seconds_of[page] for page in chosen)
    others = [page for page in pages if page not in chosen]
    first = turn * STRIDE % len(others)
    for page in others[first:] + others[:first]:
        if seconds_of[page] <= left:
            chosen.append(page)
            left -= seconds_of[page]
    return chosen


def commits(root):
    """How many commits there are; 0 where git does not tell, or is not there."""
    try:
        done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return int(done.stdout) if done.returncode == 0 else 0
