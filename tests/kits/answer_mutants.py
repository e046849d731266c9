"""Solutions of exercises with one small fault each, which graders have to refuse.

    python tests/kits/answer_mutants.py zero_3            every fault of a page's solutions that is not refused
    python tests/kits/answer_mutants.py zero_3 first      of one exercise
"""

import contextlib
import io
import random
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("tools", "tests/kits", "notebooks", ".")]

from mutation import mutants_of  # noqa: E402

from exercises import Exercise  # noqa: E402
from exercises.asking import Complaint  # noqa: E402
from exercises.solutions import parts  # noqa: E402

SECONDS = 30  # that an answer may take here: a fault may be a loop without an end


def accepted(slug, name, most=None, seed=1):
    """List the faults ("old → new, line") of an exercise's solution that its grader takes for right, but for those
    that its table calls the same. `most`: draw so many faults."""
    path = ROOT / "tests" / "exercises" / f"test_{slug}.py"
    lines = {line for first, last in parts(slug, name) for line in range(first, last + 1)}
    faults = [each for each in mutants_of(path, ROOT) if each.line in lines]
    if most is not None and len(faults) > most:
        faults = random.Random(f"{seed} {slug} {name}").sample(faults, most)
    source, found = path.read_bytes(), []
    for fault in faults:
        namespace = {"__name__": f"with_a_fault_{slug}", "__file__": str(path)}
        try:
            exec(compile(fault.of(source), str(path), "exec"), namespace)
        except Exception:
            continue  # it is refused before it is given
        exercise = next(each for each in namespace["ANSWERS"] if each.__name__ == name)
        table = namespace["ANSWERS"][exercise]
        if fault.change not in table.same and not complained(exercise, table.right[0]):
            found.append(f"{fault.change}, line {fault.line}: {fault.text}")
    return found


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


def main():
    slug, *names = sys.argv[1:]
    Exercise.apart = False
    from importlib import import_module

    import rank_pool
    from exercises_kit import NAMES

    page = import_module(f"exercises.{slug}")
    if hasattr(page, "launch"):
        page.launch = rank_pool.pooled
    for name in names or [each for each in NAMES if hasattr(page, each)]:
        for line in accepted(slug, name):
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
