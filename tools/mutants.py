"""Give files small faults, one at a time, and tell which of them the tests beside the file do not notice.

    python tools/mutants.py refimpl/zero/update.py --count 20     20 faults of a file that you changed
    python tools/mutants.py --count 300 --seed 1                  the fixed draw, over all packages

A fault is a comparison, an operation or a condition exchanged, a default changed, a number one larger, two arguments
swapped, a call dropped, memory kept that was freed, a hook left. First all faults meet the tests that a push draws of
the file's package, its own test file before the others and the quick before the slow; then those that no test noticed
meet the tests of `make test-all`. A test that hangs has noticed. Tests against the clock are left out: beside other
work they fail without a fault. Two faults are tried at a time, each in a copy of HEAD. What was tried is kept in
build/mutants/: interrupt it, and go on later. What lived is tried again once there are other tests, and everything once
the package differs: then the test that noticed a fault before comes first. `--record` writes to tests/mutants.jsonl
which test that was: another checkout then takes minutes where this one took hours. tests/mutants.toml lists faults that
change nothing, each with the reason.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent))
from mutation import mutants_of

ROOT = Path(__file__).resolve().parent.parent
TIERS = {"push": 0.95, "all": 0.97}  # of the faults that change something, how many each is to notice
RECORD = Path("tests", "mutants.jsonl")
AT_ONCE = 2
HANGS = "it hangs"
PATIENCE = 4, 60  # times what tests/costs.json says that the tests take, and seconds more: what takes longer hangs


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders of refimpl/; default: all")
    parser.add_argument("--count", type=int, default=20, help="how many faults are drawn (default: 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write who noticed what to tests/mutants.jsonl")
    chosen = parser.parse_args()
    if why := refused(chosen.paths):
        sys.exit(why)
    files = files_of(chosen.paths)
    drawn = draw(files, chosen.count, chosen.seed)
    said = try_all(drawn)
    if chosen.record:
        record(drawn)
    print(report(drawn, said))
    sys.exit(0 if enough(drawn, said) else 1)


def refused(paths):
    """Say in one sentence why nothing is tried; None if all is well."""
    for path in paths:
        if not path.resolve().is_relative_to(ROOT / "refimpl") or not path.exists():
            return f"{path}: expected a file or folder of refimpl/"
        if not files_of([path]):
            return f"{path}: there are no tests beside it (tests/ mirrors refimpl/): write one first"
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        return f"{changed.splitlines()[0][3:]} has changes: commit them, since faults are tried in copies of HEAD"
    return None


def files_of(paths):
    """List the files that have tests beside them."""
    found = []
    for path in paths or [ROOT / "refimpl"]:
        path = path.resolve()
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in found if beside(path.relative_to(ROOT).as_posix()) is not None]


def beside(file):
    """Return where the tests of a file are: its package's folder, or a file of the first level. None if nowhere."""
    parts = Path(file).with_suffix("").parts[1:]
    place = Path("tests", parts[0]) if len(parts) > 1 else Path("tests", f"test_{parts[0]}.py")
    return place.as_posix() if (ROOT / place).exists() else None


def draw(files, count, seed):
    """Draw mutants: of each package as many as its share of lines, at least one; the kinds of fault by turns.

    A fault's lot is its own: what is drawn stays drawn, whatever is written elsewhere.
    """
    packages = defaultdict(list)
    for path in files:
        packages[package_of(path.relative_to(ROOT).as_posix())].append(path)
    sizes = {name: sum(len(path.read_bytes().splitlines()) for path in paths) for name, paths in packages.items()}
    drawn = []
    for name, paths in sorted(packages.items()):
        kinds = defaultdict(list)
        for mutant in (each for path in paths for each in mutants_of(path, ROOT)):
            kinds[mutant.kind].append(mutant)
        shuffled = [sorted(each, key=partial(_lot, seed)) for _, each in sorted(kinds.items())]
        by_turns = [each[turn] for turn in range(max(map(len, shuffled), default=0)) for each in shuffled
                    if turn < len(each)]
        drawn += by_turns[: max(1, round(count * sizes[name] / sum(sizes.values())))]
    return drawn


def _lot(seed, mutant):
    return hashlib.sha256(f"{seed} {mutant.file} {mutant.text} {mutant.change}".encode()).digest()


def package_of(file):
    return Path(file).parts[1].removesuffix(".py")


# --- trying ----------------------------------------------------------------------------------------------------------


def try_all(drawn):
    """Try each that was not tried before, two at a time. Return {name: a tier, "lived" or "equivalent"}."""
    known = equivalents()
    said = {each.name: "equivalent" for each in drawn if (each.file, each.text, each.change) in known}
    kept = ROOT / "build" / "mutants" / f"{git('rev-parse', '--short=12', 'HEAD:refimpl')}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    head, lived, before = git("rev-parse", "--short=12", "HEAD"), set(), who_noticed()
    for name, tier, test, tests in verdicts(kept):
        if test:
            said.setdefault(name, tier)
        elif tests == head:
            lived.add((name, tier))
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, kept.open("a") as file:
        copies = SimpleQueue()
        for tier in TIERS:
            left = [each for each in drawn if each.name not in said and (each.name, tier) not in lived]
            if left and copies.empty():
                for n in range(AT_ONCE):
                    git("clone", "--quiet", "--shared", str(ROOT), f"{folder}/{n}")
                    copies.put(Path(folder, str(n)))
            for mutant, test in tried(left, tier, copies, before):
                if test:
                    said[mutant.name] = tier
                file.write(json.dumps([mutant.name, tier, test, head]) + "\n")
                file.flush()
                print(f"{tier:4} {'noticed' if test else 'lived':7} {mutant.name}", flush=True)
    return {each.name: said.get(each.name, "lived") for each in drawn}


def verdicts(path):
    """List what a file of lines holds: of what was tried [a mutant's name, tier, the test that noticed it or None, the
    commit of the tests]; of RECORD [anywhere(name), the test]."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def who_noticed():
    """Return {anywhere(name): the test that noticed it once}, here or where tests/mutants.jsonl was written."""
    found = dict(verdicts(ROOT / RECORD))
    for path in (ROOT / "build" / "mutants").glob("*.jsonl"):
        found |= {anywhere(name): test for name, _, test, _ in verdicts(path) if test}
    return found


def record(drawn):
    """Write to the tree which test noticed what of this draw, in the order of the files."""
    found = who_noticed()
    names = sorted({anywhere(each.name) for each in drawn} & found.keys())
    (ROOT / RECORD).write_text("".join(json.dumps([name, found[name]]) + "\n" for name in names))


def anywhere(name):
    """Return a mutant's name without its place in the file, which lines above it move."""
    return re.sub(r":\d+\+\d+ ", " ", name, count=1)


def tried(left, tier, copies, before):
    """Yield (mutant, the test of the tier that notices it, or None). `before`: {anywhere(name): who noticed it once}.
    """
    if not left:
        return
    copy = copies.get()
    selection, sound = collected(copy, tier), set()
    copies.put(copy)

    def try_one(mutant):
        copy = copies.get()
        try:
            return mutant, who_notices(mutant, copy, selection, sound, before.get(anywhere(mutant.name)))
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(try_one, left)


def collected(copy, tier):
    """List the ids of the tests that a tier runs of the whole tree."""
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "2", "--tier", tier,
                           "-m", "not alone", "tests"], cwd=copy, env=environment(copy), capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if not found:
        sys.exit(f"no tests were collected: {done.stdout[-500:]}{done.stderr[-500:]}")
    return found


def who_notices(mutant, copy, selection, sound, first=None):
    """Return the test beside the mutant's file that fails, or a word where one hangs, or None. `first`: the test that
    noticed it before; `sound`: tests that passed without a fault."""
    path, place = copy / mutant.file, beside(mutant.file)
    own, source = f"test_{Path(mutant.file).stem}.py::", path.read_bytes()
    costs = json.loads((Path(__file__).parents[1] / "tests" / "costs.json").read_text())

    def seconds(test):
        all_cases, cases = costs.get(test.partition("[")[0], (1, 1))
        return all_cases / cases

    tests = sorted((each for each in selection if each.startswith(place + ("" if place.endswith(".py") else "/"))),
                   key=lambda test: (test != first, own not in test, seconds(test)))
    if not tests:
        return None
    limit, found = PATIENCE[0] * sum(map(seconds, tests)) + PATIENCE[1], HANGS
    while found == HANGS:
        path.write_bytes(mutant.of(source))
        try:
            found = first_failure(tests, copy, limit)
        finally:
            path.write_bytes(source)
        if found != HANGS or first_failure(tests, copy, limit) != HANGS:
            break
        limit *= 2  # beside other work they take as long without the fault
    if found in tests and found not in sound:
        if first_failure([found], copy, None):
            raise SystemExit(f"{found} fails without a fault: mend that first")
        sound.add(found)
    return found


def first_failure(tests, copy, seconds):
    """Run tests until one fails and return it, or another word where none began or all took longer than `seconds`.
    Return None if all passed. Nothing of a run is left."""
    listed = copy / "build" / "tests.txt"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(tests))
    with open(copy / "build" / "said.txt", "w") as said:  # a pipe would stay open while a process that was left has it
        run = subprocess.Popen([sys.executable, "-m", "pytest", "-qx", "-rfE", "-p", "no:cacheprovider", f"@{listed}"],
                               cwd=copy, env=environment(copy), stdout=said, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        run.wait(seconds)
    except subprocess.TimeoutExpired:
        return HANGS
    finally:
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
    lines = [line.partition(" ")[2] for line in Path(said.name).read_text().splitlines()
             if line.startswith(("FAILED ", "ERROR "))]
    failed = [test for test in tests if any(line == test or line.startswith(test + " - ") for line in lines)]
    return next(iter(failed), "it cannot be read") if run.returncode else None


def environment(copy):
    """Return the variables with which a copy is imported, and not the checkout that is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests' / 'kits'}", "OMP_WAIT_POLICY": "passive",
            "PYTHONDONTWRITEBYTECODE": "1"}


def equivalents():
    """Return {(file, line's text, change)} of the faults that are known to change nothing."""
    path = ROOT / "tests" / "mutants.toml"
    listed = tomllib.loads(path.read_text()).get("equivalent", ())
    return {(each["file"], each["text"], each["change"]) for each in listed}


def git(*arguments):
    """Return what git says in the checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


# --- telling ---------------------------------------------------------------------------------------------------------


def counts(drawn, said):
    """Return {package: [drawn, equivalent, noticed on a push, noticed by either]}."""
    rows = defaultdict(lambda: [0, 0, 0, 0])
    for each in drawn:
        row, found = rows[package_of(each.file)], said[each.name]
        row[0] += 1
        row[1] += found == "equivalent"
        row[2] += found == "push"
        row[3] += found in TIERS
    return rows


def report(drawn, said):
    """Return the table of packages, and below it what lived."""
    lines = [f"{'package':18}{'drawn':>7}{'equivalent':>12}{'push':>7}{'nightly':>9}"]
    rows = counts(drawn, said)
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines += [f"{name:18}{row[0]:7}{row[1]:12}{row[2]:7}{row[3]:9}" for name, row in rows.items()]
    lines += [f"{said[each.name]}: {each.name}\n       {each.text}" for each in drawn
              if said[each.name] not in ("push", "equivalent")]
    return "\n".join(lines)


def enough(drawn, said):
    """Tell whether each tier noticed the share that it is to notice."""
    row = [sum(column) for column in zip(*counts(drawn, said).values(), strict=True)]
    changing = row[0] - row[1]
    return row[2] >= TIERS["push"] * changing and row[3] >= TIERS["all"] * changing


if __name__ == "__main__":
    main()
