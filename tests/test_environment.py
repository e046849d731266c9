"""pyproject.toml, the constraints, environment.yml, the docs and the workflows name the same things."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from refimpl import versions as refimpl_versions

ROOT = Path(__file__).parent.parent
PINS, OTHERS = "constraints.txt", ("constraints-2.11.txt", "constraints-2.14.txt")
FILES = ("pyproject.toml", "constraints.txt", "environment.yml", ".github/workflows/cpu.yml")
NIGHTLY = (ROOT / ".github/workflows/nightly.yml").read_text()


def requirements(lines):
    """name -> Requirement, without comments, options such as `-e .`, and the package itself."""
    parsed = [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-"))]
    return {canonicalize_name(r.name): r for r in parsed if r.name != "refimpl"}


def exact_version(requirement):
    """The X of `name==X`, or None for any other form."""
    (spec, *more) = requirement.specifier or [None]
    return spec.version if spec and not more and spec.operator == "==" and "*" not in spec.version else None


def problems(pyproject, constraints, environment, workflow):
    """Everything in which the four texts disagree; empty when they agree."""
    project = tomllib.loads(pyproject)["project"]
    direct = requirements(sum(project["optional-dependencies"].values(), project["dependencies"]))
    pins = requirements(constraints.splitlines())
    conda = yaml.safe_load(environment)["dependencies"]
    pip_lines = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    conda_pins = requirements(pip_lines)
    conda_python = SpecifierSet(next(e for e in conda if str(e).startswith("python")).removeprefix("python"))
    found = []

    for name, requirement in direct.items():
        if any(spec.operator != ">=" for spec in requirement.specifier):
            found.append(f"{name} is capped: {requirement}")
        if name not in pins:
            found.append(f"{name} is not in constraints.txt")
        elif version := exact_version(pins[name]):
            if not requirement.specifier.contains(version):
                found.append(f"{name} {version} of constraints.txt is below {requirement}")
        else:
            found.append(f"{name} is not pinned exactly in constraints.txt: {pins[name]}")
    for name in pins.keys() | conda_pins.keys():
        ours, theirs = (exact_version(side[name]) if name in side else None for side in (pins, conda_pins))
        if ours != theirs:
            found.append(f"{name} is {ours} in constraints.txt and {theirs} in environment.yml")
    if "linux" not in str(direct["triton"].marker) or "linux" not in str(conda_pins["triton"].marker):
        found.append("triton is not for Linux only")
    if "-e ." not in pip_lines:
        found.append("environment.yml does not install refimpl")

    ours = SpecifierSet(project["requires-python"])
    tested = yaml.safe_load(workflow)["jobs"]["test"]["strategy"]["matrix"]["python"]
    for minor in (f"3.{n}" for n in range(20)):
        if conda_python.contains(minor) != (minor in tested):
            found.append(f"Python {minor} is either tested or allowed by environment.yml, not both")
        if minor in tested and not ours.contains(minor):
            found.append(f"Python {minor} is tested, but requires-python is {ours}")
    return found


def test_the_files_agree():
    assert problems(*((ROOT / name).read_text() for name in FILES)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("pyproject.toml", '"torch>=2.11"', '"torch>=2.11,<3"', "torch is capped"),
        ("pyproject.toml", '"torch>=2.11"', '"torch>=99"', "torch 2.13.0 of constraints.txt is below"),
        ("pyproject.toml", "; sys_platform == 'linux'", "", "triton is not for Linux only"),
        ("pyproject.toml", '"tqdm>=', '"rich>=13", "tqdm>=', "rich is not in constraints.txt"),
        ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.12"', "Python 3.11 is tested"),
        ("constraints.txt", "torch==", "torch>=", "torch is not pinned exactly"),
        ("constraints.txt", "numpy==2", "numpy==1", "below numpy>="),
        ("environment.yml", "torch==2.13.0", "torch==2.12.0", "torch is 2.13.0 in constraints.txt and 2.12.0"),
        ("environment.yml", "      - ruff==", "      # ruff==", "and None in environment.yml"),
        ("environment.yml", "      - -e .", "", "does not install refimpl"),
        ("environment.yml", "<3.14", "<3.13", "Python 3.13 is either"),
        (".github/workflows/cpu.yml", '"3.11", ', "", "Python 3.11 is either"),
    ],
)
def test_a_disagreement_is_found(file, old, new, problem):
    texts = {name: (ROOT / name).read_text() for name in FILES}
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new, 1)
    assert any(problem in line for line in problems(*texts.values())), problems(*texts.values())


def versions(name):
    """name → version of a file of constraints."""
    return {name: exact_version(pin) for name, pin in requirements((ROOT / name).read_text().splitlines()).items()}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tested_versions_differ_in_torch_and_what_goes_with_it(other):
    ours, theirs = versions(PINS), versions(other)
    assert {"torch", "torchvision", "triton"} <= {
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} <= {
        "torch", "torchvision", "triton", "numpy", "transformers"}
    for pins in (ours, theirs):  # torchvision 0.26 asks for torch 2.11, 0.28 for 2.13, 0.29 for 2.14
        assert Version(pins["torchvision"]).minor == Version(pins["torch"]).minor + 15
        assert Version(pins["triton"]) < Version("3.7") or Version(pins["numpy"]) >= Version("2.4")
    oldest = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert all(oldest[name].specifier.contains(theirs[name]) for name in ("torch", "triton", "numpy"))
    assert other == f"constraints-{Version(theirs['torch']).major}.{Version(theirs['torch']).minor}.txt"


def test_all_name_the_same_tested_versions():
    """The package, the files, the docs, `make test-versions` and what runs at night."""
    tested = [f"{Version(versions(name)['torch']).major}.{Version(versions(name)['torch']).minor}"
              for name in (OTHERS[0], PINS, OTHERS[1])]
    assert list(refimpl_versions.TESTED) == tested
    rows = re.findall(r"^\| \[(\S+)\]\S+ \| (.+) \|$", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    columns = ("torch", "triton", "torchvision", "transformers", "numpy")
    assert {name: cells.split(" | ")[:5] for name, cells in rows} == {
        name: [versions(name)[column] for column in columns] for name in (PINS, *OTHERS)}
    (line,) = re.findall(r"^test-versions: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [f"make {name}" for name in line.split()]
    assert commands == ["make test-2.11", "make test", "make test-2.14"]
    assert {*commands, "make test-all", "make test-matrix"} < set(re.findall(r"command: (make[^,]+)", NIGHTLY))
    loose = set(re.search(r"\^\((.+)\)==", NIGHTLY)[1].split("|"))
    assert loose == {"torch", "torchvision", "triton", "transformers"}, "pinned where the newest torch is tested"


def test_each_job_has_a_target_below_its_limit():
    jobs = yaml.safe_load(NIGHTLY)["jobs"]["job"]["strategy"]["matrix"]["include"]
    assert all(job["target"] < job["limit"] for job in jobs)
    minutes = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"]["minutes"]
    for tier in ("all", "matrix"):
        (job,) = [job for job in jobs if job["command"] == f"make test-{tier}"]
        assert job["target"] == minutes[tier]["target"] <= minutes[tier]["limit"] < job["limit"]


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# What an action's version is in its own repository.
COMMITS = {("actions/checkout", "v4.2.2"): "11bd71901bbe5b1630ceea73d27597364c9af683",
           ("actions/setup-python", "v5.6.0"): "a26af69be951a213d495a4c3e4e4022e16d87065",
           ("actions/upload-artifact", "v4.6.2"): "ea165f8d65b6e75b540449e92b4886f43607fa02"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_only_read_and_runs_no_action_that_another_can_change(path):
    """A tag can be moved to other code; a commit cannot."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", each) for each in used)
    pinned = re.findall(r"uses: (\S+)@(\w+) # (v\d+\.\d+\.\d+)$", text, re.MULTILINE)
    assert [f"{action}@{commit}" for action, commit, _ in pinned] == used, "the version is not beside it"
    assert all(COMMITS[action, version] == commit for action, commit, version in pinned)


def test_make_and_conda_set_the_same_environment():
    exported = dict(re.findall(r"^export (\w+) = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    del exported["PIP_DISABLE_PIP_VERSION_CHECK"]  # of the set-up alone
    assert yaml.safe_load((ROOT / "environment.yml").read_text())["variables"] == exported
    assert exported["OMP_WAIT_POLICY"] == "passive"
