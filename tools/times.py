"""Print what the tests and pages of a run took, the costliest first; in CI, fail where the run took too long.

    python tools/times.py build/times.json            what `pytest --times FILE` wrote
    python tools/times.py build/times.json --record   keep the costs in tests/costs.json, from which tiers are drawn

A run of a tier has a target and a limit in pyproject.toml. Above the target one line says so. Above
the limit the exit status is 1 where the environment says CI=true.
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
NEGLIGIBLE = 0.1  # seconds of a function with all its cases: not recorded


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--record", action="store_true", help="write tests/costs.json; after a run of every case only")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        parser.error(f"no file {arguments.file}: write it with pytest --times {arguments.file}")
    run = json.loads(arguments.file.read_text())
    print(report(run))
    if arguments.record:
        if run["tier"] != "matrix":
            parser.error(f"{arguments.file} is of the tier {run['tier']}: costs are those of make test-matrix")
        COSTS.write_text(recorded(run["functions"]))
    over = over_limit(run, tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"]["minutes"])
    if over:
        print(over)
    sys.exit(1 if over and "limit" in over and os.environ.get("CI") == "true" else 0)


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


def over_limit(run, minutes):
    """Return a line if a run took longer than its target, or its limit; else None."""
    took, allowed = run["seconds"] / 60, minutes[run["tier"]]
    if took <= allowed["target"]:
        return None
    which = "limit" if took > allowed["limit"] else "target"
    return (f"{run['tier']}: {took:.1f} minutes are over its {which} of {allowed[which]}: make the costliest cheaper, "
            "or give the tier fewer seconds (pyproject.toml)")


def recorded(functions):
    """Return the text of costs.json: a line for each function that takes more than a negligible time."""
    kept = {name: each for name, each in functions.items() if each[0] >= NEGLIGIBLE and each[1]}  # not what was skipped
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items()) + "\n}\n"


if __name__ == "__main__":
    main()
