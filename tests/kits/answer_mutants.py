"""Solutions of exercises, and our own of blanks, with one small fault each, which graders have to refuse.

    python tests/kits/answer_mutants.py zero_3            every fault of a page's solutions that is not refused
    python tests/kits/answer_mutants.py zero_3 first      of one exercise, or of one blank by its function's name
"""

import contextlib
import io
import linecache
import os
import random
import signal
import sys
import zlib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("notebooks", "tests/kits", "tools", ".")]  # tools has a `blanks`, too

import rank_pool  # noqa: E402
import torch  # noqa: E402
from exercises_kit import exercises_of  # noqa: E402
from mutation import mutants_of  # noqa: E402

from exercises import Exercise  # noqa: E402
from exercises.asking import Complaint  # noqa: E402
from exercises.solutions import parts, parts_of_blank  # noqa: E402

SECONDS = 10  # that an answer may take here: a fault may be a loop without an end


def accepted(slug, names=(), most=None):
    """Return {exercise: faults of its solution ("old → new, line") that its grader takes for right}, but for those that
    its table calls the same. `names`: of these exercises alone; `most`: draw so many faults of each."""
    page, path = _page("exercises", slug), ROOT / "tests" / "exercises" / f"test_{slug}.py"

    def answer(namespace, exercise):
        return namespace["ANSWERS"][exercise].right[0]

    return {each.key: _accepted(each, path, path, parts(slug, each.key), answer, most)
            for each in exercises_of(page) if not names or each.key in names}


def accepted_blanks(slug, names=(), most=None):
    """Return the same of what a page has its reader build: {function: faults of ours}."""
    page, path = _page("blanks", slug), ROOT / "notebooks" / "blanks" / f"{slug}.py"
    tests = ROOT / "tests" / "blanks" / f"test_{slug}.py"

    def answer(namespace, exercise):
        return namespace[exercise.key]

    return {each.key: _accepted(each, path, tests, parts_of_blank(slug, each.key), answer, most)
            for each in exercises_of(page) if not names or each.key in names}


def _page(folder, slug):
    page = import_module(f"{folder}.{slug}")
    if hasattr(page, "launch"):
        page.launch = rank_pool.pooled
    return page


def _accepted(exercise, path, tests, lines, answer, most):
    """List the faults within `lines` of `path` that are taken for right. `tests` has the table."""
    faults = [each for each in mutants_of(path, ROOT) if any(first <= each.line <= last for first, last in lines)]
    if most is not None and len(faults) > most:
        faults = random.Random(f"{path} {exercise.key}").sample(faults, most)
    judged = _complained_apart if b"\nimport triton" in tests.read_bytes() else complained
    same, source, found = _run(tests.read_bytes(), tests)["ANSWERS"][exercise].same, path.read_bytes(), []
    if judged is _complained_apart:
        complained(exercise, answer(_run(source, path), exercise))  # imports, once for all processes
    for fault in faults:
        if fault.change in same:
            continue
        try:
            faulty = answer(_run(fault.of(source), path), exercise)
        except Exception:
            continue  # refused before it is given
        if not judged(exercise, faulty):
            found.append(f"{fault.change}, line {fault.line}: {fault.text}")
    return found


def _run(source, path):
    """Return the names that a module defines, from its source. Ranks get its functions by value. Triton's interpreter
    reads the source of a kernel again, by the name of its file: a name of its own has this source, not the file's."""
    namespace = {"__name__": f"blanks.with_a_fault_{path.stem}", "__file__": str(path), "__package__": "blanks"}
    name = f"{path.stem} {zlib.crc32(source):08x}"
    linecache.cache[name] = len(source), None, source.decode().splitlines(keepends=True), name
    exec(compile(source, name, "exec"), namespace)
    return namespace


def complained(exercise, answer):
    """Tell whether a grader refuses an answer. An answer that does not end is refused."""
    def ring(*_):
        raise Complaint("no answer in time")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return exercise.complaint(answer) is not None
    except Exception:
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _complained_apart(exercise, answer):
    """The same in a process of its own: a kernel with a fault may write anywhere. One that dies is refused."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    torch.set_num_threads(1)  # there are no others after a fork
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says as it dies, and warnings of arithmetic
    os._exit(complained(exercise, answer))


def main():
    slug, *names = sys.argv[1:]
    Exercise.apart = False
    for folder, function in (("blanks", accepted_blanks), ("exercises", accepted)):
        if (ROOT / "notebooks" / folder / f"{slug}.py").exists():
            for key, lines in function(slug, names).items():
                print(*(f"{key}: {line}" for line in lines), sep="\n", end="\n" if lines else "", flush=True)


if __name__ == "__main__":
    main()
