"""Print what the tests and pages of a run took, the costliest first; in CI, fail where the run took too long.

    python tools/times.py build/times.json            what `pytest --times FILE` wrote
    python tools/times.py build/times.json --record   keep the costs in tests/costs.json, from which tiers are drawn
    python tools/times.py build/times.json --add      keep those of functions that have none yet, of any whole run

A run of a tier has a target and a limit in pyproject.toml. Above the target one line says so. Above the limit the
exit status is 1 where the environment says CI=true. Functions of which costs.json says nothing, or far too little, are
named: a tier is longer than its draw by what they took.
"""

import argparse
import json
import os
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ROOT / "tests" / "costs.json"
MOST = 25  # functions that are printed
AMISS = 3.0, 5.0  # times what was recorded, and seconds: a function that took more than both is named
COMPLETE = 0.9  # of the functions that have a cost: a run of fewer is no run of everything


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--record", action="store_true", help="write tests/costs.json; after a run of every case only")
    parser.add_argument("--add", action="store_true", help="write costs of functions that have none yet")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        parser.error(f"no file {arguments.file}: write it with pytest --times {arguments.file}")
    run = json.loads(arguments.file.read_text())
    print(report(run))
    if arguments.record:
        if why := incomplete(run, json.loads(COSTS.read_text())):
            parser.error(f"{arguments.file} {why}: costs are those of make test-matrix")
        COSTS.write_text(recorded(run["functions"]))
    if arguments.add:
        if run["status"] not in (0, 1):
            parser.error(f"{arguments.file} is of a run that was cut")
        COSTS.write_text(recorded(dict(sorted((run["functions"] | json.loads(COSTS.read_text())).items()))))
    for line in amiss(run["functions"], json.loads(COSTS.read_text())):
        print(line)
    if run["tier"] is None:
        return
    passed, line = over(run, tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"]["minutes"])
    if passed:
        print(line)
    sys.exit(1 if passed == "limit" and os.environ.get("CI") == "true" else 0)


def incomplete(run, costs):
    """Return why a run does not tell what everything costs, or None."""
    if run["tier"] != "matrix":
        return f"is of the tier {run['tier']}"
    if run["status"] not in (0, 1):  # 1: some tests failed, and took their time
        return "is of a run that was cut"
    ran = len(run["functions"])
    return f"has {ran} functions, costs.json {len(costs)}" if ran < COMPLETE * len(costs) else None


def amiss(functions, costs):
    """Yield a line for each function that took far more than its cost says."""
    times, least = AMISS
    for name, (seconds, cases) in functions.items():
        known, of = costs.get(name, (0.0, 1))
        if seconds > least and cases and seconds > times * known * cases / of:
            yield (f"{name} took {seconds:.1f} s, {cases} cases; tests/costs.json has {known * cases / of:.1f} s: "
                   "record anew after make test-matrix (tools/times.py --record), or a push takes longer than its draw")


def report(run):
    """Return the table of a run."""
    functions = run["functions"]
    whole = sum(seconds for seconds, _ in functions.values()) or 1
    pages = sum(seconds for name, (seconds, _) in functions.items() if name.endswith(".ipynb"))
    dearest = Counter({name: seconds for name, (seconds, _) in functions.items()}).most_common(MOST)
    lines = [f"{seconds:8.1f} s  {functions[name][1]:5} cases  {name}" for name, seconds in dearest]
    share = sum(seconds for _, seconds in dearest) / whole
    lines.append(f"{run['tier']}: {run['seconds'] / 60:.1f} minutes with {run['workers']} workers, of whose time tests "
                 f"took {whole - pages:.0f} s and pages {pages:.0f} s; the {len(dearest)} costliest took {share:.0%}")
    return "\n".join(lines)


def over(run, minutes):
    """Return ("limit" or "target", a line that says so) if a run took longer, else (None, "")."""
    took, allowed = run["seconds"] / 60, minutes[run["tier"]]
    if took <= allowed["target"]:
        return None, ""
    which = "limit" if took > allowed["limit"] else "target"
    return which, (f"{run['tier']}: {took:.1f} minutes are over its {which} of {allowed[which]}: make the costliest "
                   "cheaper, or give the tier fewer seconds (pyproject.toml)")


def recorded(functions):
    """Return the text of costs.json: a line for each function. What is skipped here counts as one case."""
    kept = {name: [seconds, max(cases, 1)] for name, (seconds, cases) in functions.items()}
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items()) + "\n}\n"


if __name__ == "__main__":
    main()
