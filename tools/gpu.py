"""Runs what needs a GPU: the GPU tests, every notebook, every benchmark. It sets nothing up and needs no network.

It uses the interpreter that runs it, which must have torch, triton and pytest, and for the notebooks nbval, nbclient
and ipykernel (on PYTHONPATH will do); refimpl is taken from this checkout. It writes the readings to
data/measurements/, and logs, test reports and executed notebooks to build/gpu/. With OUT=dir in the environment all of
it is also packed into dir/gpu.tar.gz, to be unpacked at the root of a checkout, beside dir/summary.txt.

REFIMPL_ALLOW_CPU=1 rehearses on a machine without a GPU; the readings then stay in build/gpu/.
"""

import importlib.util
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
SECONDS, SECONDS_PER_STEP = 570, 240  # so that one step that hangs leaves time for the others
BEGAN = time.time()
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

ENVIRONMENT = dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="120")
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT.pop("MPLBACKEND", None)  # else figures in notebooks are not shown

PROBE = """
import json, platform, torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps(dict(gpu=gpu, python=platform.python_version(), torch=torch.__version__, triton=triton.__version__)))
"""


def machine() -> dict:
    """The GPU and the versions. Asked of a second process: a CUDA context here would count in the driver's readings."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=ENVIRONMENT)
    if answer.returncode:
        sys.exit(f"make gpu: {sys.executable} cannot say what GPU there is: {answer.stderr.strip().splitlines()[-1]}")
    found = json.loads(answer.stdout.splitlines()[-1])
    if not found["gpu"] and os.environ.get("REFIMPL_ALLOW_CPU") != "1":
        sys.exit(f"make gpu: no GPU was found (torch {found['torch']} of {sys.executable} sees none)")
    return found


def steps(rehearsal: bool) -> list[tuple[str, list[str], list[str]]]:
    """(name, modules it needs, command), in the order in which they are run; what is not there yet is left out."""
    notebooks = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("notebooks/*.ipynb"))]
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    found = []
    if list(ROOT.glob("tests/gpu/**/test_*.py")):
        found.append(("tests", ["pytest"], [*pytest, "tests/gpu", f"--junitxml={BUILD}/tests.xml"]))
    if notebooks:
        nbval = [*pytest, "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", *notebooks]
        found.append(("nbval", ["pytest", "nbval"], [*nbval, f"--junitxml={BUILD}/nbval.xml"]))
        execute = [sys.executable, "tools/notebooks.py", "--out", f"{BUILD}/notebooks", *notebooks]
        found.append(("notebooks", ["nbclient", "ipykernel"], execute))
    if (ROOT / "refimpl" / "bench").is_dir():
        bench = [sys.executable, "-m", "refimpl.bench", "all", "--record"]
        found.append(("bench", [], [*bench, "--out", f"{BUILD}/measurements"] if rehearsal else bench))
    return found


def run(name: str, modules: list[str], command: list[str]) -> tuple[str, float]:
    """Runs one step, showing its output while it is written to the log. Returns the verdict and the seconds."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        return f"FAILED: {sys.executable} has no {', '.join(missing)}", 0.0
    print(f"\n== {name}: {' '.join(command)}", flush=True)
    start, log = time.time(), BUILD / f"{name}.log"
    limit = min(SECONDS_PER_STEP, SECONDS - (start - BEGAN))
    if limit <= 0:
        return f"FAILED: not run, the {SECONDS} seconds for everything were used up", 0.0
    with log.open("wb") as sink, log.open("rb") as shown:
        child = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=sink, stderr=sink, start_new_session=True)
        try:
            code = None
            while code is None:
                time.sleep(0.2)
                code = child.poll()
                sys.stdout.buffer.write(shown.read())
                sys.stdout.buffer.flush()
                if code is None and time.time() - start > limit:
                    return f"FAILED: stopped after {limit:.0f} seconds", limit
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return "passed" if code == 0 else f"FAILED: exit status {code}", time.time() - start


def closing_lines(name: str) -> list[str]:
    """The last line of a step's log, after the lines that name what failed."""
    log = BUILD / f"{name}.log"
    text = COLOURS.sub("", log.read_text(errors="replace")) if log.exists() else ""
    lines = [line.strip(" =") for line in text.splitlines() if line.strip(" =")]
    return [line for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))][:20] + lines[-1:]


def pack(summary: str) -> None:
    """Writes the summary, and where OUT names a folder, packs everything this run wrote into it."""
    (BUILD / "summary.txt").write_text(summary)
    if not os.environ.get("OUT"):
        return
    out = Path(os.environ["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.txt").write_text(summary)
    readings = [p for p in sorted((ROOT / "data" / "measurements").rglob("*.json")) if p.stat().st_mtime >= BEGAN]
    with tarfile.open(out / "gpu.tar.gz", "w:gz") as archive:
        for path in [BUILD, *readings]:
            archive.add(path, arcname=path.relative_to(ROOT))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it started
    found = machine()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    versions = "torch {torch}, triton {triton}, Python {python}".format(**found)
    summary = f"refimpl on {found['gpu'] or 'no GPU (a rehearsal)'}: {versions}\n"
    failed = False
    for name, modules, command in steps(rehearsal=not found["gpu"]):
        verdict, seconds = run(name, modules, command)
        failed |= verdict != "passed"
        summary += f"{name:<10} {seconds:6.1f} s  {verdict}\n"
        summary += "".join(f"           {line}\n" for line in closing_lines(name))
        pack(summary)  # after every step: a run that is cut short leaves what it has
    summary += f"{'in all':<10} {time.time() - BEGAN:6.1f} s  {'FAILED' if failed else 'passed'}\n"
    pack(summary)
    print(f"\n{summary}", end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
