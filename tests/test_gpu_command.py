"""`make gpu` in a checkout of stand-ins: benchmarks that raise and hang, a page that fails, runs that are cut."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from patience import slowness

from benchmarks import NAMES as ALL_NAMES
from benchmarks import smoke

ROOT = Path(__file__).parent.parent
NO_GPU = "recall", "recall_many", "which", "losses"  # what they read does not depend on the device
NAMES = [name for name in ALL_NAMES if name not in NO_GPU]

TORCH = """__version__ = '0'
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
"""
# A row at once, and then what it was told to do; each row is on disk before the next is read, as in benchmarks.
BENCH = """
import json, os, pathlib, sys, time
name, out = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "cpu"
out.mkdir(parents=True, exist_ok=True)
partial = out / f"{name}.partial.json"
row = {"verdict": "right"}
partial.write_text(json.dumps({"rows": [row]}))
with open("order", "a") as file:
    file.write(f"{name}\\n")
what = json.loads(os.environ.get("STANDINS", "{}")).get(name)
if what == "raises":
    raise ValueError("no such kernel")
if what == "hangs":
    time.sleep(600)
(out / f"{name}.json").write_text(json.dumps({"rows": [row, row]}))
partial.unlink()
"""
PAGES = {"00_good": ["1 + 1", "print('two')"], "01_fails": ["1 + 1", "raise ValueError('on this page')", "3"],
         **{f"0{i}_long": ["'before'", "import time\ntime.sleep(600)"] for i in range(2, 7)}}


@pytest.fixture
def checkout(tmp_path):
    """tools/gpu.py among stand-ins, which take no time; it packs more often."""
    for name in ("tools/gpu.py", "conftest.py", "Makefile", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tool, often = tmp_path / "tools/gpu.py", re.compile(r"^PACKED_EVERY = 5\b", re.MULTILINE)
    text, changed = often.subn("PACKED_EVERY = 0.2", tool.read_text())
    assert changed == 1
    tool.write_text(text)
    for name, text in {"torch.py": TORCH, "triton.py": "__version__ = '0'\n", "refimpl/__init__.py": "",
                       "benchmarks/__init__.py": "", "benchmarks/__main__.py": BENCH,
                       "tests/gpu/test_one.py": "def test_it():\n    pass\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "kits").mkdir()
    (tmp_path / "notebooks").mkdir()
    for name, sources in PAGES.items():
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        nbformat.write(page, tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def begin(checkout, seconds, only="", **standins):
    environment = os.environ | {"REFIMPL_ALLOW_CPU": "1", "REFIMPL_SECONDS": str(seconds), "ONLY": only,
                                "OUT": str(checkout / "out"), "STANDINS": json.dumps(standins)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.Popen([sys.executable, "tools/gpu.py"], cwd=checkout, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def rows(checkout):
    """{file: rows} of the readings that came back in OUT."""
    with tarfile.open(checkout / "out" / "gpu.tar.gz") as archive:
        archive.extractall(checkout / "back", filter="data")
    return {path.name: len(json.loads(path.read_text())["rows"])
            for path in (checkout / "back").rglob("measurements/cpu/*.json")}


READINGS = ",".join(NAMES)


@pytest.mark.alone
def test_a_bench_that_raises_and_one_that_hangs_cost_the_others_nothing(checkout):
    run = begin(checkout, 24, READINGS, smoke="hangs", attention="raises")
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 1
    whole = [name for name in NAMES if name not in ("smoke", "attention")]
    cut = {"smoke.partial.json": 1, "attention.partial.json": 1}
    assert rows(checkout) == {f"{name}.json": 2 for name in whole} | cut
    summary = (checkout / "out" / "summary.txt").read_text()
    assert said.endswith(summary) and "rehearsal" in summary
    assert "FAILED: exit status 1; 1 rows, not all\n" in summary and "ValueError: no such kernel" in summary
    assert "FAILED: stopped after " in summary and summary.count("passed; 2 rows\n") == len(whole)
    assert [*dict.fromkeys((checkout / "order").read_text().split())] == run_order()


def test_benches_of_ranks_are_left_to_machines_with_a_gpu_for_each(checkout):
    one = TORCH.replace("False", "True").replace("0)", "1)") + "    get_device_name = staticmethod(lambda: 'One GPU')\n"
    (checkout / "torch.py").write_text(one)
    for steps in ("meter,zero,comm", "zero"):
        said, _ = (run := begin(checkout, 60, steps)).communicate(timeout=90)
        assert run.returncode == 0 and (checkout / "order").read_text() == "meter\n"
        assert re.search(r"zero +0\.0 s  not run: 4 GPUs are needed, 1 found\n", said)


def test_a_summary_counts_the_kernels_that_are_right(tmp_path):
    (tmp_path / "gpu").mkdir()
    rows = [{"verdict": "right"}, {"verdict": "wrong"}, {"verdict": "right"}]
    (tmp_path / "gpu" / "smoke.json").write_text(json.dumps({"rows": rows}))
    gpu = gpu_module()
    gpu.BEGAN -= 60
    assert gpu.read_by("smoke", tmp_path) == ("; 3 rows, 2 of 3 right", 1)


def test_nothing_to_run_is_a_failure(checkout):
    """No GPU for each rank: all steps that were asked for are left out. No files: the folder has moved."""
    shutil.rmtree(checkout / "tests" / "gpu")
    run = begin(checkout, 20, "tests")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and "FAILED: there are no files" in said


def test_what_a_job_started_ends_with_it(tmp_path, monkeypatch):
    gpu = gpu_module()
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    job = gpu.Job("job", ["sh", "-c", "sleep 60 & echo $! >sleeper; exit 0"])
    job.process.wait(10)
    pid = int((gpu.ROOT / "sleeper").read_text())
    (gpu.ROOT / "sleeper").unlink()
    job.end()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10)


def run_order():
    """The benchmarks in the order of tools/gpu.py."""
    return [name for name in steps() if name in NAMES]


def gpu_module():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tools" / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    return gpu


def steps():
    return gpu_module().STEPS


def test_a_file_that_is_being_written_does_not_end_the_run(tmp_path, monkeypatch):
    gpu, done = gpu_module(), threading.Event()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    log = tmp_path / "build" / "page.log"
    log.parent.mkdir()
    log.write_bytes(bytes(2**24))

    def write():
        while not done.is_set():
            log.write_bytes(bytes(2**24))
            log.write_bytes(b"short")
            log.rename(log.with_suffix(".partial")).rename(log)  # as a record is replaced

    writing = threading.Thread(target=write)
    writing.start()
    try:
        report = gpu.Report("title")
        for _ in range(20):
            report.keep(now=True)
    finally:
        done.set()
        writing.join()
    report.add("last", 1.0, "passed")
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as archive:
        assert archive.extractfile("build/page.log").read() == b"short"
        assert b"last" in archive.extractfile("build/summary.txt").read()


def test_readings_come_first_the_kernels_before_all_and_each_bench_is_a_step():
    found = steps()
    assert list(found)[:2] == ["smoke", "attention"] and list(found)[-2:] == ["tests", "notebooks"]
    assert set(found) == {*NAMES, "tests", "notebooks"}
    assert sum(found[name] for name in NAMES) == 404 and found["tests"] == 90 and sum(found.values()) < 600
    assert smoke.SECONDS == 20 < found["smoke"]  # beside the kernels' own time, that of the process that asks them


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_run_that_is_cut_has_written_what_it_had(how, checkout):
    run = begin(checkout, 600, READINGS, meter="hangs")
    partial, packed = checkout / "build/gpu/measurements/cpu/meter.partial.json", checkout / "out" / "gpu.tar.gz"
    # a while into a step that has read one row
    until(lambda: partial.exists() and packed.exists() and packed.stat().st_mtime > partial.stat().st_mtime)
    run.send_signal(how)
    run.communicate(timeout=30)
    assert rows(checkout) == {"smoke.json": 2, "attention.json": 2, "meter.partial.json": 1}
    if how == signal.SIGKILL:  # nobody was left to end the job
        subprocess.run(["pkill", "-KILL", "-f", f"benchmarks meter --record --out {checkout}"], check=True)
    assert "attention" in (checkout / "out" / "summary.txt").read_text()


def until(condition, seconds=120):
    """Wait for it, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_pages_are_run_once_and_one_that_is_cut_has_its_cells(checkout):
    for page in (checkout / "notebooks").glob("0[3-6]_long.ipynb"):
        page.unlink()
    run = begin(checkout, 600, "tests,notebooks")
    executed, summary = checkout / "build/gpu/notebooks", checkout / "build/gpu/summary.txt"
    until(lambda: summary.exists() and {"00_good", "01_fails"} <= set(summary.read_text().split())
          and all((executed / f"{page}.ipynb").exists() for page in ("00_good", "01_fails", "02_long")))
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    verdicts = {line.split()[0]: line for line in summary.read_text().splitlines() if " s  " in line}
    assert "passed" in verdicts["tests"] and "passed" in verdicts["00_good"]
    assert "exit status 1" in verdicts["01_fails"] and not (checkout / "order").exists()
    cells = {path.stem: nbformat.read(path, as_version=4).cells for path in executed.glob("*.ipynb")}
    assert cells["00_good"][0].outputs[0].data["text/plain"] == "2"
    assert cells["00_good"][0].outputs[0].execution_count == cells["00_good"][0].execution_count == 1  # nbval has 0
    assert cells["00_good"][1].outputs[0].text == "two\n" and cells["00_good"][1].execution_count == 2
    assert cells["01_fails"][1].outputs[0].evalue == "on this page"
    assert cells["02_long"][0].outputs[0].data["text/plain"] == "'before'" and cells["02_long"][1].outputs == []


def test_pages_that_the_time_does_not_reach_are_named(checkout):
    run = begin(checkout, 3, "notebooks")
    run.communicate(timeout=120)
    summary = (checkout / "out" / "summary.txt").read_text()
    verdicts = {line.split()[0]: line for line in summary.splitlines() if " s  " in line}
    assert run.returncode == 1 and "stopped after" in verdicts["02_long"]
    assert verdicts["06_long"].endswith("LEFT OUT: the time was used up")  # four at once, and two that end
    assert re.search(r"\nleft out: .*06_long; make gpu ONLY=notebooks runs them\n", summary)


@pytest.mark.parametrize("only", ["attention,typo", "typo"])
def test_a_step_that_nobody_knows_is_named(only, checkout):
    run = begin(checkout, 5, only)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 1 and said.startswith(f"make gpu: ONLY={only}: no step is called typo; there are smoke, ")


def test_make_hands_only_on(checkout):
    """A variable of make's command line is in the environment of what it runs."""
    (checkout / "tools" / "gpu.py").write_text("import os\nprint('asked for', os.environ['ONLY'])\n")
    done = subprocess.run(["make", "gpu", "ONLY=zero", f"PYTHON={sys.executable}"], cwd=checkout, capture_output=True,
                          text=True)
    assert "asked for zero\n" in done.stdout, done.stderr


def test_the_kernels_tests_are_asked_once_and_a_failure_is_told_when_it_happens(checkout):
    """Workers would each ask all of a module's processes; a run that is cut has no summary of pytest's own."""
    gpu = gpu_module()
    gpu.ROOT, kernels = checkout, checkout / "tests" / "gpu" / "test_attention.py"
    kernels.write_text("def test_kernels():\n    pass\n")
    jobs = gpu.jobs_of("tests", checkout, 60)
    assert list(jobs) == ["attention_tests", "tests"] and "-n" not in jobs["attention_tests"]
    assert str(kernels.relative_to(checkout)) in jobs["attention_tests"] and not any("attention" in word for word in
                                                                                    jobs["tests"])
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", kernels.parent)
    kernels.write_text("def test_it(cuda):\n    pass\n")
    (kernels.parent / "test_one.py").write_text(
        "import time, pytest\n@pytest.fixture(autouse=True, scope='session')\ndef cuda():\n    pass\n"
        "def test_first():\n    assert 'the reason' == 1\ndef test_hangs():\n    time.sleep(600)\n")
    limit = 20 * slowness()  # its four workers are to begin within
    run = begin(checkout, limit, "tests")
    said, _ = run.communicate(timeout=limit + 60)
    assert run.returncode == 1 and "test_first failed:" in said and "the reason" in said and "stopped after" in said
