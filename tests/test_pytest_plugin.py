"""The fixture and the marker `memory_budget`, in a user's own pytest: the file below, run whole."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest

PLUGIN = ("-p", "refimpl.pytest_plugin")

TESTS = '''
import unittest
import pytest, torch
from refimpl import memory

def train(rows=64):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(rows, 64)).sum().backward()
        optimizer.step()

def test_context_over(memory_budget):
    with memory_budget("60 KiB"):
        train()
    raise RuntimeError("not reached")

def test_context_under(memory_budget):
    with memory_budget("70 GiB"):
        train()
    torch.ones(2**20)  # behind it

def test_call_over(memory_budget):
    memory_budget(60 * 2**10)
    train()

@pytest.mark.memory_budget("90 KiB")
def test_marker_under():
    train()

@pytest.mark.memory_budget("90 KiB")
def test_marker_over_with_twice_the_batch():
    train(128)

@pytest.mark.memory_budget("70 GiB", per="test")
def test_marker_per_test():
    train()
    torch.empty(2**20)

@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.memory_budget("60 KiB")
def test_each(rows):
    train(rows)

class TestMethods(unittest.TestCase):
    @pytest.mark.memory_budget("60 KiB")
    def test_over(self):
        train()

    @pytest.mark.memory_budget("70 GiB")
    def test_under(self):
        train()

    @pytest.mark.memory_budget("60 KiB")
    def test_own_error(self):
        train()
        self.assertEqual(1, 2)

def test_own_error(memory_budget):
    memory_budget("60 KiB")
    train()
    raise RuntimeError("its own")

@pytest.mark.memory_budget("60 KiB")
def test_skipped():
    train()
    pytest.skip("its own")

@pytest.mark.memory_budget("70 GiB")
def test_nested(memory_budget):
    memory_budget("70 GiB")

@pytest.mark.memory_budget("70 GB")
def test_bad_limit():
    pass

def test_in_a_tracker(memory_budget):
    with memory.track():
        memory_budget("70 GiB")

def test_one_after_another(memory_budget):
    for _ in range(2):
        with memory_budget("70 GiB"):
            train()

@pytest.mark.flaky(reruns=1)
@pytest.mark.memory_budget("60 KiB")
def test_run_again():
    train()

@pytest.fixture
def begins(memory_budget):
    memory_budget("1 GiB")

@pytest.fixture
def fails(begins):
    raise RuntimeError("its own")

def test_setup_fails(fails):
    pass

def test_after_all_nothing_is_open(memory_budget):
    with memory.track():
        train()

def test_no_budget():
    train()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("users")
    (folder / "test_users.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return folder


def run(folder, *options):
    """Return ({test: (outcome, message)}, {test: its peak}, what was printed) of the file in a process of its own."""
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-sq", "--junitxml=found.xml"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    outcomes, peaks = {}, {}
    for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
        name = f"{case.get('classname').partition('.')[2]}.{case.get('name')}".lstrip(".")
        other = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcomes[name] = ("passed", "") if other is None else (other.tag, other.get("message"))
        peaks |= {name: [int(each.get("value")) for each in case.iter("property") if each.get("name") == "memory_peak"]}
    return outcomes, peaks, done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(folder):
    return run(folder)


OVER = "refimpl.guard.budget.OverBudget: optimizer step 2 (SGD): "


@pytest.mark.parametrize(("name", "outcome", "words"), [
    ("test_context_over", "failure", OVER), ("test_call_over", "failure", OVER), ("test_run_again", "failure", OVER),
    ("test_marker_over_with_twice_the_batch", "failure", OVER), ("test_each[64]", "failure", OVER),
    ("TestMethods.test_over", "failure", OVER), ("test_context_under", "passed", ""),
    ("test_marker_under", "passed", ""), ("test_marker_per_test", "passed", ""), ("test_each[1]", "passed", ""),
    ("TestMethods.test_under", "passed", ""), ("test_one_after_another", "passed", ""),
    ("TestMethods.test_own_error", "failure", "AssertionError: 1 != 2"),
    ("test_own_error", "failure", "RuntimeError: its own"), ("test_skipped", "skipped", "its own"),
    ("test_setup_fails", "error", 'failed on setup with "RuntimeError: its own"'),
    ("test_nested", "failure", "RuntimeError: a memory budget of 75,161,927,680 bytes begins within another"),
    ("test_in_a_tracker", "failure", "begins within Tracker, a dispatch mode: end that one first"),
    ("test_bad_limit", "failure", "ValueError: memory budget: invalid size value: '70 GB'"),
    ("test_after_all_nothing_is_open", "passed", ""), ("test_no_budget", "passed", "")])
def test_a_user_s_test(found, name, outcome, words):
    assert found[0][name][0] == outcome and words in found[0][name][1]


def test_all_of_them_are_looked_at(found):
    (looked_at,) = [each.args[1] for each in test_a_user_s_test.pytestmark]
    assert sorted(found[0]) == sorted(name for name, *_ in looked_at)


def test_the_peak_is_a_property_of_each_test_that_measured(found):
    outcomes, peaks, _ = found
    (same,) = {peak for name in ("test_context_under", "test_call_over", "test_marker_under", "test_each[64]",
                                 "test_own_error", "test_skipped", "TestMethods.test_over") for peak in peaks[name]}
    (twice,), (whole,) = peaks["test_marker_over_with_twice_the_batch"], peaks["test_marker_per_test"]
    assert 60 * 2**10 < same <= 90 * 2**10 < twice and 2**22 <= whole < 2**22 + same
    assert f"{OVER}{same:,} bytes on cpu" in outcomes["test_call_over"][1]
    assert len(peaks["test_one_after_another"]) == len(peaks["test_run_again"]) == 1
    assert peaks["test_no_budget"] == peaks["test_bad_limit"] == peaks["test_after_all_nothing_is_open"] == []


def test_a_failure_says_where_and_a_test_that_passes_prints_nothing(found):
    quiet, failures = found[2].split("= FAILURES =")
    assert "bytes" not in quiet and "budget" not in quiet
    assert ": model(torch.ones(rows, 64)).sum().backward()\n" in failures.partition("by line:")[2]
    assert "by module:" in failures and "contextlib.py" not in failures and "ERROR at teardown" not in failures


def test_workers_say_the_same(found, folder):
    outcomes, peaks, _ = run(folder, "-n", "2")
    assert outcomes == found[0] and peaks == found[1]


def test_the_plugin_loads_no_torch_and_names_its_marker(folder):
    (folder / "asks.py").write_text("import sys\ndef pytest_unconfigure():\n"
                                    "    print('torch' in sys.modules, 'refimpl.pytest_plugin' in sys.modules)")
    done = subprocess.run([sys.executable, "-m", "pytest", *PLUGIN, "-p", "asks", "--markers"], cwd=folder,
                          capture_output=True, text=True)
    assert "@pytest.mark.memory_budget(limit, per='step'): " in done.stdout
    assert done.stdout.rstrip().endswith("False True"), done.stdout
