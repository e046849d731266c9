"""What a push runs: a draw of fixed size that covers; and the table of what a run took."""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiers

ROOT = Path(__file__).parent.parent
SETTINGS = {"seed": 1, "tests": 50, "pages": 60, "core_pages": ["p0"], "each": False}


def item(name, case=None, marks=(), **indices):
    """What a draw asks of a pytest.Item. `indices`: which value each argument has."""
    path = Path(name.partition("::")[0])
    more = {"callspec": SimpleNamespace(indices=indices)} if indices else {}
    return SimpleNamespace(nodeid=name if case is None else f"{name}[{case}]", path=path,
                           get_closest_marker=lambda mark: mark if mark in marks else None, **more)


def matrix(name, *sizes, skip=lambda row: False):
    rows = [row for row in product(*map(range, sizes)) if not skip(row)]
    return [item(name, "-".join(map(str, row)), **{f"a{i}": at for i, at in enumerate(row)}) for row in rows]


def many(package, count, marks=()):
    return [item(f"tests/{package}/test_x.py::test_{i}", marks=marks) for i in range(count)]


def seconds(kept, costs):
    return sum(tiers.seconds_of_a_case(tiers.function_of(each), [each], costs) for each in kept)


def test_everything_is_run_where_it_fits():
    items = many("a", 20) + matrix("tests/b/test_m.py::test_m", 3, 4)
    assert tiers.drawn(items, {}, SETTINGS, 0) == items


def test_what_has_no_cost_yet_is_taken_to_be_dear():
    """As a file under another name: else all its cases would come on top of the draw."""
    old, renamed = many("a", 200), matrix("tests/b/test_new.py::test_m", 20, 10)
    costs = {tiers.function_of(each): [1.0, 1] for each in old}
    kept = tiers.drawn(old + renamed, costs, SETTINGS, 0)
    assert 99 <= len(kept) <= 101 and 1 <= len([each for each in kept if each in renamed]) < 10


def test_one_process_draws_half_of_what_two_do():
    items = many("a", 400)
    costs = {tiers.function_of(each): [1.0, 1] for each in items}
    assert [len(tiers.drawn(items, costs, SETTINGS, 0, workers)) for workers in (1, 2)] == [50, 100]


def test_a_draw_is_as_long_as_it_may_be_however_many_tests_there_are():
    for count in (200, 2000):
        items = many("a", count) + many("b", count // 2)
        costs = {tiers.function_of(each): [0.5 + i % 7, 1] for i, each in enumerate(items)}
        kept = tiers.drawn(items, costs, SETTINGS, 0)
        assert 90 <= seconds(kept, costs) <= 100  # 2 workers, 50 s each
        drawn, left = ({costs[each.nodeid][0] for each in items if (each in kept) is taken} for taken in (True, False))
        assert max(drawn) <= min(left), "the cheap before the dear"


def test_a_new_capability_takes_its_share_from_the_others():
    old, new = many("a", 300), many("new", 100)
    costs = {tiers.function_of(each): [1.0, 1] for each in old + new}
    before, after = tiers.drawn(old, costs, SETTINGS, 0), tiers.drawn(old + new, costs, SETTINGS, 0)
    assert len(before) == len(after) == 100 and 15 <= len([each for each in after if each in new]) <= 35


def test_the_core_is_always_drawn_and_of_those_against_the_clock_one_a_package():
    core, clock = many("a", 4, ("core",)), many("clock", 5, ("alone",))
    costs = {tiers.function_of(each): [90.0, 1] for each in core + clock}
    costs["tests/clock/test_x.py::test_3"] = [80.0, 1]
    kept = tiers.drawn(core + clock, costs, SETTINGS, 0)
    assert kept == [*core, clock[3]]


def test_a_second_case_counts_as_twice_as_dear():
    quick, dear = matrix("tests/a/test_x.py::test_quick", 20, 20), many("a", 60)
    costs = {tiers.function_of(each): [1.0, 1] for each in dear} | {"tests/a/test_x.py::test_quick": [40.0, 400]}
    kept = tiers.drawn(quick + dear, costs, SETTINGS | {"tests": 30.55}, 0)
    assert len([each for each in kept if each in quick]) in (10, 11) and all(each in kept for each in dear)


def test_a_dear_matrix_is_drawn_by_pairs():
    cases = matrix("tests/a/test_x.py::test_m", 6, 5, 4)
    kept = tiers.drawn(cases, {"tests/a/test_x.py::test_m": [240.0, 120]}, SETTINGS | {"tests": 40}, 0)
    rows = [tuple(each.callspec.indices.values()) for each in kept]
    assert len(rows) == 40 and pairs_of(rows) == pairs_of([tuple(each.callspec.indices.values()) for each in cases])


def test_where_each_function_is_asked_for_it_has_a_case_and_the_clock_all_of_its_tests():
    dear, clock = matrix("tests/a/test_x.py::test_dear", 5, 5), many("clock", 5, ("alone",))
    items = dear + clock + many("b", 20)
    costs = {tiers.function_of(each): [90.0, 1] for each in items} | {"tests/a/test_x.py::test_dear": [2250.0, 25]}
    kept = tiers.drawn(items, costs, SETTINGS | {"each": True}, 0)
    assert len(kept) == 1 + 5 + 20 and {*map(tiers.function_of, kept)} == {*map(tiers.function_of, items)}


def pairs_of(rows):
    return {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


@pytest.mark.parametrize("skip", [lambda row: False, lambda row: row[0] == row[1]], ids=["whole", "with holes"])
def test_the_first_cases_of_a_matrix_hold_each_pair_of_values(skip):
    cases = matrix("tests/b/test_m.py::test_m", 5, 4, 3, 3, skip=skip)
    ordered = tiers.covering(cases, "seed")
    rows = [tuple(each.callspec.indices.values()) for each in ordered]
    assert sorted(rows) == sorted(tuple(each.callspec.indices.values()) for each in cases)
    least = next(n for n in range(len(rows)) if pairs_of(rows[:n]) >= pairs_of(rows))
    assert least <= 30 < len(rows) / 4, "by chance it takes most of them"
    assert pairs_of(rows[:10]) < pairs_of(rows)


def test_another_seed_is_another_draw_and_the_same_seed_the_same():
    items = matrix("tests/b/test_m.py::test_m", 20, 10) + matrix("tests/b/test_m.py::test_one_argument", 90)
    costs = {"tests/b/test_m.py::test_m": [400.0, 200], "tests/b/test_m.py::test_one_argument": [90.0, 90]}
    first, again, other = (tiers.drawn(items, costs, SETTINGS | {"seed": seed}, 0) for seed in (1, 1, 2))
    assert first == again != other and len(first) == len(other)


def test_pages_run_whole_the_core_ones_always_and_the_others_by_turns():
    pages = [f"notebooks/{number:02}_p{number}.ipynb" for number in range(30)]
    items = [item(f"{page}::Cell {i}") for page in pages for i in range(3)]
    costs = {page: [20.0, 3] for page in pages}
    seen = Counter()
    for turn in range(40):
        kept = Counter(each.nodeid.partition("::")[0] for each in tiers.drawn(items, costs, SETTINGS, turn))
        assert set(kept.values()) == {3} and len(kept) == 6 and pages[0] in kept  # 120 s of 20 s each
        seen.update(set(kept))
    assert set(seen) == set(pages) and seen[pages[0]] == 40
    assert len(tiers.drawn(items, {page: [4.0, 3] for page in pages}, SETTINGS, 0)) == 90
    assert len(tiers.drawn(items, costs, SETTINGS | {"each": True}, 0)) == 90


def test_pages_take_turns_by_commits(tmp_path):
    assert tiers.commits(tmp_path) == 0  # no repository
    for command in ("init -q", *["-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"] * 2):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert tiers.commits(tmp_path) == 2
    with mock.patch.object(subprocess, "run", side_effect=FileNotFoundError):
        assert tiers.commits(tmp_path) == 0  # no git


# --- what a run took -------------------------------------------------------------------------------------------------


def times(path, *options, **environment):
    return subprocess.run([sys.executable, ROOT / "tools" / "times.py", path, *options], capture_output=True, text=True,
                          env=environment)


@pytest.fixture
def run(tmp_path):
    def write(tier="push", minutes=5.0, status=0):
        path = tmp_path / "times.json"
        functions = {"tests/a/test_x.py::test_dear": [90.0, 3], "notebooks/00_x.ipynb": [9.0, 4]}
        path.write_text(json.dumps({"tier": tier, "status": status, "seconds": 60 * minutes, "workers": 2,
                                    "functions": functions}))
        return path
    return write


def test_the_costliest_are_printed_first(run):
    done = times(run())
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["90.0", "s", "3", "cases", "tests/a/test_x.py::test_dear"]
    assert "push: 5.0 minutes with 2 workers, of whose time tests took 90 s and pages 9 s" in done.stdout


@pytest.mark.parametrize("tier", ["push", "all", "matrix"])
def test_a_run_over_its_limit_fails_in_ci(run, tier):
    minutes = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"]["minutes"][tier]
    over = times(run(tier, minutes["limit"] + 1), CI="true")
    assert over.returncode == 1 and f"are over its limit of {minutes['limit']}" in over.stdout
    assert times(run(tier, minutes["limit"] + 1)).returncode == 0, "elsewhere it is said"
    near = times(run(tier, minutes["target"] + 1), CI="true")
    assert near.returncode == 0 and f"are over its target of {minutes['target']}" in near.stdout
    assert "over its" not in times(run(tier, minutes["target"] - 1), CI="true").stdout


def test_costs_are_recorded_of_a_run_of_everything_alone(run):
    before = (ROOT / "tests" / "costs.json").read_text()
    for tier, status, words in (("push", 0, "is of the tier push"), (None, 0, "is of the tier None"),
                                ("matrix", 2, "is of a run that was cut"), ("matrix", 0, "has 2 functions, costs")):
        done = times(run(tier, status=status), "--record")
        assert done.returncode == 2 and words in done.stderr
    assert times(ROOT / "no such file").returncode == 2
    assert (ROOT / "tests" / "costs.json").read_text() == before


def test_costs_are_added_of_functions_that_have_none(run):
    """In a copy of the tool's checkout."""
    module = runpy.run_path(ROOT / "tools" / "times.py", run_name="times")
    costs = run().parent / "costs.json"
    costs.write_text('{"notebooks/00_x.ipynb": [1.0, 4], "tests/old.py::test_it": [2.0, 1]}')
    for status, code in ((0, 0), (2, 2)):
        with mock.patch.dict(module["main"].__globals__, COSTS=costs), pytest.raises(SystemExit) as done, \
                mock.patch.object(sys, "argv", ["times.py", str(run(status=status)), "--add"]):
            module["main"]()
        assert done.value.code == code
    assert json.loads(costs.read_text()) == {
        "tests/a/test_x.py::test_dear": [90.0, 3], "tests/old.py::test_it": [2.0, 1], "notebooks/00_x.ipynb": [1.0, 4]}


def test_what_is_skipped_where_costs_are_recorded_costs_next_to_nothing():
    recorded = runpy.run_path(ROOT / "tools" / "times.py")["recorded"]
    assert json.loads(recorded({"ran": [1.0, 2], "skipped": [0.1, 0]})) == {"ran": [1.0, 2], "skipped": [0.1, 1]}


def test_a_function_that_took_far_more_than_its_cost_is_named(run):
    assert "tests/a/test_x.py::test_dear took 90.0 s, 3 cases; tests/costs.json has 0.0 s" in times(run()).stdout
    amiss = runpy.run_path(ROOT / "tools" / "times.py")["amiss"]
    taken = {"as before": [20.0, 2], "twice": [40.0, 2], "four times": [40.0, 1], "small": [4.0, 1], "none": [9.0, 0]}
    costs = {"as before": [10.0, 1], "twice": [20.0, 2], "four times": [20.0, 2], "small": [0.1, 1]}
    assert [line.partition(" took")[0] for line in amiss(taken, costs)] == ["four times"]


def test_a_push_is_drawn_by_pytest(tmp_path):
    """By the real hooks: two runs draw the same, which is less than everything, and its times are written."""
    def collected(*options):
        done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "tests/test_floors.py",
                               "tests/accumulation"], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"PYTEST_ADDOPTS": ""})
        return [line for line in done.stdout.splitlines() if "::" in line]

    everything, push = collected(), collected("--tier", "push")
    assert push == collected("--tier", "push") and set(push) <= set(everything) and push
    core = collected("-m", "core")
    assert len({line.partition("[")[0] for line in core}) == len(core) > 5 and set(core) <= set(push), "a case of each"


def test_the_core_has_each_technique_s_paper_and_two_of_its_tests():
    core = tomllib.loads((ROOT / "tests" / "core.toml").read_text())
    tests = [*(ROOT / "tests").rglob("test_*.py")]
    of = {path.relative_to(ROOT / "tests").parts[0] for path in tests
          if re.search(r"^ +check_paper\(", path.read_text(), re.MULTILINE)}
    assert of - {"memory", "comm"} <= set(core["techniques"]) and {"memory", "comm"} <= set(core["ground"])
    held = "".join(path.read_text() for path in tests)
    for path in (ROOT / "refimpl" / "papers").glob("[a-z]*.py"):
        assert re.search(rf'check_paper\("[a-z0-9_/]+", "{path.stem}"', held), f"{path} has no test"
    for name in sum((*core["techniques"].values(), *core["ground"].values()), [core["floors"]]):
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(), f"core.toml names {name}: there is none"


def environment_of_its_kernel(name, cuda=False):
    """What TRITON_INTERPRET says while a page or a test is set up, and after."""
    hook = runpy.run_path(str(ROOT / "conftest.py"))["pytest_runtest_setup"]
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), mock.patch("torch.cuda.is_available", lambda: cuda):
        setup = hook(item(name))
        next(setup)
        within = os.environ.get("TRITON_INTERPRET")
        with pytest.raises(StopIteration):
            setup.send(None)
        return within, os.environ.get("TRITON_INTERPRET")


def test_a_page_starts_without_the_interpreter_that_tests_have_switched_on():
    assert environment_of_its_kernel("notebooks/01_page.ipynb") == (None, "1")
    assert environment_of_its_kernel("notebooks/01_page.ipynb", cuda=True) == ("1", "1")
    assert environment_of_its_kernel("tests/test_a.py::test_a") == ("1", "1")
