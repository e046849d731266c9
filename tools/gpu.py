"""Runs what needs a GPU: readings first, then the GPU tests, then every notebook. It sets nothing up, needs no network.

A GPU is at hand for minutes, so a run that is cut at any moment has written what it had. Each step has a limit of its
own and adds what earlier ones did not use; every benchmark writes each row as it is read; a step that fails or hangs
ends itself and no other. All of it takes less than ten minutes.

    make gpu                          everything
    make gpu ONLY=attention,zero      these steps alone, which then share all of the time: STEPS below has their names

It uses the interpreter that runs it, which must have torch, triton and pytest, and for the notebooks nbval and
ipykernel (on PYTHONPATH will do); refimpl is taken from this checkout. It writes the readings to data/measurements/,
and logs, test reports and executed notebooks to build/gpu/. With OUT=dir in the environment all of it is also packed
into dir/gpu.tar.gz every few seconds, to be unpacked at the root of a checkout, beside dir/summary.txt.

REFIMPL_ALLOW_CPU=1 rehearses on a machine without a GPU; the readings then stay in build/gpu/.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
BEGAN = time.time()
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# Each step and its seconds, in order. Readings take 404: the kernels first, of which no other machine can say anything.
STEPS = {
    "smoke": 25, "attention": 55, "meter": 35, "zero": 25, "zero_quantized": 15, "checkpointing": 25,
    "precision": 20, "activations": 15, "tensor_parallel": 15, "context_parallel": 10, "pipeline": 15, "sequences": 20,
    "sparse": 12, "linear": 10, "accumulation": 15,
    "comm": 10, "compression": 10, "offload": 15, "cross_entropy": 25, "kernels": 10,
    "allocator": 12, "static_plan": 10,
    "tests": 90, "notebooks": 105,
}
SECONDS = float(os.environ.get("REFIMPL_SECONDS", sum(STEPS.values())))  # for all of them
GPUS = dict.fromkeys(("zero", "tensor_parallel", "context_parallel", "pipeline", "comm"), 4)  # a rank on each
NEEDS = {"tests": ["pytest"], "notebooks": ["pytest", "nbval", "ipykernel"]}  # modules, besides torch and triton
AT_ONCE = max(4, (os.cpu_count() or 1) // 2)  # pages, and tests
PACKED_EVERY = 5  # seconds
GRACE = 5  # seconds that a process has to end in after it was killed: one that waits for a hung GPU may not

ENVIRONMENT = dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="120")
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT.pop("MPLBACKEND", None)  # else figures in notebooks are not shown

PROBE = """
import json, platform, torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps(dict(gpu=gpu, gpus=torch.cuda.device_count(), python=platform.python_version(),
                      torch=torch.__version__, triton=triton.__version__)))
"""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs end with this process
    chosen, found = chosen_steps(os.environ.get("ONLY", "")), machine()
    few = [name for name in chosen if found["gpu"] and found["gpus"] < GPUS.get(name, 0)]
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    report = Report("refimpl on {}: torch {torch}, triton {triton}, Python {python}".format(
        found["gpu"] or "no GPU (a rehearsal)", **found))
    measurements = ROOT / "data" / "measurements" if found["gpu"] else BUILD / "measurements"
    until = time.time()
    share = (SECONDS - (until - BEGAN)) / (sum(STEPS[name] for name in chosen if name not in few) or 1)
    for name in chosen:
        if name in few:  # its ranks would be on the CPU, of which a run without a GPU tells more
            report.add(name, 0.0, f"not run: {GPUS[name]} GPUs are needed, {found['gpus']} found")
            continue
        until += share * STEPS[name]
        missing = [module for module in NEEDS.get(name, []) if importlib.util.find_spec(module) is None]
        if missing:
            report.add(name, 0.0, f"FAILED: {sys.executable} has no {', '.join(missing)}")
            continue
        jobs = jobs_of(name, measurements, until - time.time())
        if not jobs:
            report.add(name, 0.0, "FAILED: there are no files")
        for job, verdict, seconds in run(jobs, AT_ONCE if name == "notebooks" else 1, until, report):
            read, wrong = read_by(job, measurements) if name == job else ("", 0)
            report.add(job, seconds, "FAILED: kernels are wrong" if wrong and verdict == "passed" else verdict, read)
    report.end()
    return 1 if report.failed else 0


def chosen_steps(only: str) -> list[str]:
    """The names of ONLY in the order of STEPS; all of them if it names none."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        sys.exit(f"make gpu: ONLY={only}: no step is called {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return [name for name in STEPS if name in names] or list(STEPS)


def machine() -> dict:
    """The GPU and the versions. Asked of a second process: a CUDA context here would count in the driver's readings."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=ENVIRONMENT)
    if answer.returncode:
        sys.exit(f"make gpu: {sys.executable} cannot say what GPU there is: {answer.stderr.strip().splitlines()[-1]}")
    found = json.loads(answer.stdout.splitlines()[-1])
    if not found["gpu"] and os.environ.get("REFIMPL_ALLOW_CPU") != "1":
        sys.exit(f"make gpu: no GPU was found (torch {found['torch']} of {sys.executable} sees none)")
    return found


def jobs_of(step: str, measurements: Path, seconds: float) -> dict[str, list[str]]:
    """{name: command} of a step: one, or each notebook."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    if step == "tests":  # the kernels' tests begin processes of their own: a worker each would ask all of them again
        kernels = ROOT / "tests" / "gpu" / "test_attention.py"
        paths = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/gpu/**/test_*.py")) if path != kernels]
        ENVIRONMENT["REFIMPL_ATTENTION_SECONDS"] = str(max(20, seconds / 2))
        shared = ["-n", str(AT_ONCE), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
        jobs = {"attention_tests": [*pytest, "-v", str(kernels.relative_to(ROOT))]} if kernels.exists() else {}
        jobs |= {step: [*pytest, "-v", *shared, *paths]} if paths else {}
        return {name: [*command, f"--junitxml={BUILD}/{name}.xml"] for name, command in jobs.items()}
    if step == "notebooks":
        nbval = [*pytest, "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", f"--executed={BUILD}/notebooks"]
        pages = sorted(ROOT.glob("notebooks/*.ipynb"))
        return {page.stem: [*nbval, str(page.relative_to(ROOT)), f"--junitxml={BUILD}/{page.stem}.xml"]
                for page in pages}
    return {step: [sys.executable, "-m", "benchmarks", step, "--record", "--out", str(measurements)]}


# --- running ---------------------------------------------------------------------------------------------------------


class Job:
    """A process in a session of its own, and its log."""

    def __init__(self, name: str, command: list[str]):
        self.name, self.log, self.begun = name, BUILD / f"{name}.log", time.time()
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=sink, stderr=sink,
                                            start_new_session=True)
        self.shown = self.log.open("rb")

    def show(self) -> None:
        """Print what was written to the log since the last time."""
        sys.stdout.buffer.write(self.shown.read())
        sys.stdout.buffer.flush()

    def end(self) -> str:
        """Kill the process and all that it started; returns what is to be said of it."""
        with contextlib.suppress(ProcessLookupError):  # what it started may go on without it, and hold GPU memory
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f", and {GRACE} seconds after it was killed it is still there"
        finally:
            self.shown.close()
        return ""


def run(jobs, at_once, until, report):
    """Run {name: command}, so many at once. Yields (name, verdict, seconds) as each ends; none runs past `until`."""
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            late = time.time() >= until
            while waiting and len(running) < at_once and not late:
                name = waiting.pop(0)
                print(f"\n== {name}: {' '.join(jobs[name])}", flush=True)
                running.append(Job(name, jobs[name]))
            for job in list(running):
                code = job.process.poll()
                if at_once == 1:
                    job.show()
                if code is not None or late:
                    running.remove(job)
                    seconds, still = time.time() - job.begun, job.end()
                    yield job.name, (f"FAILED: stopped after {seconds:.0f} seconds{still}" if code is None else
                                     "passed" if code == 0 else f"FAILED: exit status {code}"), seconds
            if late:
                for name in waiting:
                    yield name, "LEFT OUT: the time was used up", 0.0
                return
            report.keep()
            time.sleep(0.1)
    finally:
        for job in running:
            job.end()


# --- what came of it -------------------------------------------------------------------------------------------------


class Report:
    """What became of each job, printed and kept in summary.txt; and all that was written, packed into OUT."""

    def __init__(self, title: str):
        self.text, self.failed, self.left_out, self.packed, self.state = f"{title}\n", False, [], 0.0, None
        print(title, flush=True)

    def add(self, name: str, seconds: float, verdict: str, read: str = "") -> None:
        """The verdict on one job; `read`: what a benchmark has written."""
        self.failed |= verdict != "passed" and not verdict.startswith("not run")
        if verdict.startswith("LEFT OUT"):
            self.left_out.append(name)
        line = f"{name:<32} {seconds:6.1f} s  {verdict}{read}\n"
        print(line, end="", flush=True)
        self.text += line + "".join(f"{'':35}{words}\n" for words in closing_lines(name, verdict))
        self.keep(now=True)

    def end(self) -> None:
        """The last lines."""
        if self.left_out:
            steps = [name if name in STEPS else "notebooks" for name in self.left_out]
            self.text += (f"left out: {', '.join(self.left_out)}; "
                          f"make gpu ONLY={','.join(dict.fromkeys(steps))} runs them\n")
        self.text += f"{'in all':<32} {time.time() - BEGAN:6.1f} s  {'FAILED' if self.failed else 'passed'}\n"
        self.keep(now=True)
        print(f"\n{self.text}", end="", flush=True)

    def keep(self, now: bool = False) -> None:
        """Write the summary and pack what has changed, every few seconds: a run may be cut at any moment."""
        if not now and time.time() - self.packed < PACKED_EVERY:
            return
        self.packed = time.time()
        summary = BUILD / "summary.txt"
        if not summary.exists() or summary.read_text() != self.text:
            summary.write_text(self.text)
        if os.environ.get("OUT"):
            self.pack(Path(os.environ["OUT"]))

    def pack(self, out: Path) -> None:
        """What this run has written, as out/gpu.tar.gz: whole at any moment."""
        found = [(path, changed(path)) for path in BUILD.rglob("*")]
        for pattern in ("measurements/**/*.json", "recordings/*/*.gz"):
            found += [(path, at) for path in (ROOT / "data").glob(pattern) if (at := changed(path)) >= BEGAN * 1e9]
        state = sorted((path, at) for path, at in found if at)
        if state == self.state:
            return
        self.state = state
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out / "gpu.tar.gz.written", "w:gz") as archive:
            for path, _ in state:
                add(archive, path)
        (out / "gpu.tar.gz.written").replace(out / "gpu.tar.gz")
        shutil.copy(BUILD / "summary.txt", out / "summary.txt.written")
        (out / "summary.txt.written").replace(out / "summary.txt")


def changed(path: Path) -> int:
    """When a file was written last, in ns; 0 for a folder, and for what was renamed since it was listed."""
    try:
        return path.stat().st_mtime_ns if path.is_file() else 0
    except FileNotFoundError:
        return 0


def add(archive: tarfile.TarFile, path: Path) -> None:
    """Put a file into an archive as it reads now: its job may be writing it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # renamed since it was listed
        return
    entry = tarfile.TarInfo(str(path.relative_to(ROOT)))
    entry.size, entry.mtime = len(data), int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def closing_lines(name: str, verdict: str) -> list[str]:
    """The last line of a job's log; of one that failed, after the lines that name what."""
    log = BUILD / f"{name}.log"
    text = COLOURS.sub("", log.read_text(errors="replace")) if log.exists() else ""
    lines = [line.strip(" =") for line in text.splitlines() if line.strip(" =")]
    named = [line for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))][:20]
    return named + lines[-1:] if verdict != "passed" or name.endswith("tests") else []


def read_by(bench: str, measurements: Path) -> tuple[str, int]:
    """How many rows a benchmark has written in this run, in words, and how many kernels of the smoke test are wrong."""
    for suffix, words in ((".json", "rows"), (".partial.json", "rows, not all")):
        for path in measurements.glob(f"*/{bench}{suffix}"):
            if path.stat().st_mtime >= BEGAN:
                rows = json.loads(path.read_text())["rows"]
                verdicts = [row["verdict"] for row in rows] if bench == "smoke" else []
                of = f", {verdicts.count('right')} of {len(rows)} right" if verdicts else ""
                return f"; {len(rows)} {words}{of}", verdicts.count("wrong")
    return "", 0


if __name__ == "__main__":
    sys.exit(main())
