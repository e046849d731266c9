"""Exercises of the page *While it trains*; the data of its script, and the report where a system holds no limit."""

import json
from pathlib import Path

import psutil
import torch

from . import exercise

HINTS = {
    "first": [
        "By how many bytes does a step grow? Take `now` of the last step minus `now` of the third, and divide by the "
        "steps between them. The first two steps make what stays.",
        "A step takes `peak` minus `now` of the step before it. Of all steps from the third on, take the most.",
        "Step n + 1 passes if `now` at the end of step n plus that is at most the capacity. With `last` the number of "
        "the last line, that gives `last + 1 + (capacity - most - now) // grows`."],
    "second": [
        "Keep the lines whose batch has as many rows as the last line's. Of one length take the largest `rest`.",
        "`np.polyfit(lengths, rests, 2)` gives c, b and a of a + bL + cL², in this order.",
        "What is known stays beside the rest: a length fits if a + bL + cL² + `sum(known.values())` of the last line "
        "is at most the capacity. Count up from the longest length that has been seen."],
    "third": [
        "A line of a failure has `failed` and `at`. The smallest `at` of all ranks is the first failure.",
        "If no line has `failed`, look for the logs without a line that has `ended`: these were killed.",
        "Of the ranks that were killed take the one whose steps have the highest `peak`."]}

ROWS, LONG, SHORT, AT = 32, 512, 20, 60  # rows of a batch; tokens of the long one, of others at most; its place
STEPS = 64
HEADS, ABOVE = 8, 240 * 2**20  # of the script's model; bytes that its run may take beside Python and libraries


def write_rows(path):
    """Write the batches of the page's script: rows of one length in each batch, and at one place of a greater one."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, SHORT + 1, (STEPS,), generator=random).tolist()
    lengths[0], lengths[AT - 1] = SHORT, LONG
    torch.save([torch.randint(256, (ROWS, length + 1), generator=random) for length in lengths], path)


def limit():
    """Return the limit of a run of the script, in bytes. On a CPU it holds for Python's and the libraries' bytes, too:
    about as many as this process has now."""
    return ABOVE + (0 if torch.cuda.is_available() else psutil.Process().memory_info().rss)


def report(folder):
    """Return the first report in a guard's folder; where the system holds no process to a limit, what Linux's said."""
    found = Path(folder) / "rank0.failure1.json"
    if found.exists():
        return json.loads(found.read_text())
    return {"step": AT, "phase": "forward", "request": 4 * ROWS * HEADS * LONG**2, "batch": [ROWS, LONG],
            "device": {"capacity": limit()}, "line": "train.py:7: model(rows[:, :-1], rows[:, 1:]).backward()",
            "causes": [{"name": "longest batch", "what": f"the longest batch so far: {ROWS} rows of {LONG}, and the "
                        f"longest before had {SHORT}",
                        "cure": "cut longer rows, put rows of one length together and fewer of long ones, or take such "
                        "a batch in micro-batches"}]}


# --- the first -------------------------------------------------------------------------------------------------------


def growing_run(base, grows, takes, first=0):
    """Return lines of steps. `takes`: what each step takes above the end of the one before; `first`: bytes of states
    that the first two steps make."""
    lines, now = [], base
    for step, nbytes in enumerate(takes, 1):
        peak = now + nbytes
        now += grows + (first if step <= 2 else 0)
        lines.append({"step": step, "peak": max(peak, now), "now": now})
    return lines


def last_that_passes(lines, capacity, since=2, takes=max):
    """Return what is right, by going on step by step; or what is not, with another first line, or other bytes taken."""
    since, end = lines[since], lines[-1]
    grows = (end["now"] - since["now"]) // (end["step"] - since["step"])
    most = takes([b["peak"] - a["now"] for a, b in zip(lines[1:], lines[2:], strict=False)])
    step, now = end["step"], end["now"]
    while now + most <= capacity:
        step, now = step + 1, now + grows
    return step


@exercise("steps", int)
def first(last_step):
    """Grade `last_step(lines, capacity)`: the last step that passes if the run goes on as it did."""
    for what, lines, capacity in (
            ("each step takes the same", growing_run(1000, 10, [200] * 12), 2000),
            ("steps take more and less", growing_run(1000, 10, [200, 220, 180, 250, 210, 190] * 3), 1600),
            ("the first two steps make states", growing_run(1000, 7, [300] * 15, first=400), 3000),
            ("the first step took the most", growing_run(5000, 25, [900, 800] + [300, 350] * 6), 8000),
            ("the next step would not pass", growing_run(1000, 10, [200] * 12), 1319),
            ("the next step takes exactly the capacity", growing_run(1000, 10, [200] * 12), 1320),
            ("the last steps took less than others before", growing_run(1000, 10, [200] * 9 + [100] * 3), 1290),
            ("the peak of the last step is exactly the capacity", growing_run(64, 8, [100] * 10), 1124)):
        right, said = last_that_passes(lines, capacity), last_step([dict(each) for each in lines], capacity)
        if said != right:
            return (f"{what}, {len(lines)} steps so far, capacity {capacity:,}: you say step {said:,}; step {right:,} "
                    f"is the last that passes{_reason(lines, capacity, said, right)}")
    return None


def _reason(lines, capacity, said, right):
    """Return what is wrong with a step, where it tells."""
    end = lines[-1]
    if said < end["step"]:
        return f", and {end['step']} have passed"
    others = {last_that_passes(lines, capacity, takes=lambda _: 0): ": a step takes more than it leaves, and that has "
              "to fit, too",
              last_that_passes(lines, capacity, since=0): ": the first two steps make what stays, and are no growth",
              last_that_passes(lines, capacity, takes=lambda taken: taken[-1]): ": another step took more above the "
              "end of the one before than the last step did",
              right + 1: ": the next one would take more than the capacity",
              right - 1: ": one more step takes no more than the capacity"}
    return others.get(said, "")


# --- the second ------------------------------------------------------------------------------------------------------


def log_of(batches, terms):
    """Return lines of steps. `batches`: (rows, length, bytes less than the terms give). The last line alone has the
    optimizer's state, as if it were made late."""
    lines = []
    for step, (rows, length, less) in enumerate(batches, 1):
        a, b, c = (term * rows for term in terms)
        rest = a + b * length + c * length**2 - less
        known = KNOWN if step == len(batches) else KNOWN | {"optimizer state": 0}
        lines.append({"step": step, "batch": {"shape": [rows, length]}, "rest": rest, "known": dict(known),
                      "peak": rest + sum(known.values())})
    return lines


KNOWN = {"parameters": 40_000, "gradients": 40_000, "optimizer state": 80_008}
LOGS = (  # what, batches, capacity, rows of the last and its terms a row
    ("three lengths", [(8, 10, 0), (8, 30, 0), (8, 20, 0)], 2_000_000, (8, 500, 90, 4)),
    ("steps of one length differ: the most that one took counts",
     [(4, 50, 3000), (4, 50, 0), (4, 80, 0), (4, 64, 0), (4, 80, 9000)], 900_000, (4, 100, 300, 7)),
    ("batches of other rows are there",
     [(2, 100, 0), (12, 33, 0), (6, 12, 0), (6, 40, 0), (2, 90, 0), (6, 25, 0)], 1_500_000, (6, 200, 50, 9)),
    ("no scores: bytes go with the length alone", [(3, 16, 0), (3, 64, 0), (3, 32, 0), (3, 48, 0)], 1_000_500,
     (3, 0, 700, 0)),
    ("one more token takes exactly the capacity", [(8, 10, 0), (8, 30, 0), (8, 20, 0)],
     160_008 + 8 * (500 + 900 * 31 + 31**2), (8, 500, 900, 1)),
    ("two more tokens fit", [(8, 10, 0), (8, 30, 0), (8, 20, 0)], 160_009 + 8 * (500 + 900 * 32 + 32**2),
     (8, 500, 900, 1)))


def longest_that_fits(capacity, rows, a, b, c):
    """Return what is right, by the terms from which a log was made."""
    length = 1
    while rows * (a + b * (length + 1) + c * (length + 1) ** 2) + sum(KNOWN.values()) <= capacity:
        length += 1
    return length


@exercise("the length", int)
def second(longest):
    """Grade `longest(lines, capacity)`: the longest batch, of as many rows as the last, that fits."""
    for what, batches, capacity, terms in LOGS:
        right, said = longest_that_fits(capacity, *terms), longest(log_of(batches, terms[1:]), capacity)
        if said != right:
            rows, a, b, c = terms
            rest = rows * (a + b * said + c * said**2)
            return (f"{what}: you say {said:,}, whose rest is {rest:,.0f} bytes; {sum(KNOWN.values()):,} are known, "
                    f"and {capacity:,} is the capacity; {right:,} is the longest that fits")
    return None


# --- the third -------------------------------------------------------------------------------------------------------


def _steps(*peaks):
    return [{"step": step, "peak": peak, "now": peak - 5} for step, peak in enumerate(peaks, 1)]


def _failed(at, step=4):
    return [{"failed": 1, "step": step, "at": at, "why": "the longest batch so far"}, {"ended": "by RuntimeError"}]


ENDED = [{"ended": "by itself", "at": 9.0}]
RUNS = (
    ("one failed, the others were killed by the launcher", "rank2",
     {"rank0": _steps(70, 90, 80), "rank1": _steps(70, 70, 70), "rank2": _steps(60, 60, 60) + _failed(5.0)}),
    ("two failed, in the same step", "rank1",
     {"rank0": _steps(70, 70, 70) + _failed(8.5), "rank1": _steps(60, 60, 60) + _failed(8.25)}),
    ("the one that failed first was a step ahead", "rank3",
     {"rank1": _steps(70, 70, 70) + _failed(7.5, 4), "rank3": _steps(70, 70, 70, 70) + _failed(7.0, 5)}),
    ("a failure that the script caught came first", "rank0",
     {"rank0": _steps(50, 50, 50) + _failed(3.0)[:1] + ENDED, "rank1": _steps(60, 60, 60) + _failed(6.0)}),
    ("no request failed, and two were killed", "rank1",
     {"rank0": _steps(99, 99, 99) + ENDED, "rank1": _steps(80, 90, 70), "rank2": _steps(85, 85, 85)}),
    ("no request failed, and the one that was killed is not the fullest", "rank2",
     {"rank0": _steps(99, 90, 99) + ENDED, "rank1": _steps(90, 99, 99) + ENDED, "rank2": _steps(80, 80, 80)}),
    ("all ended by themselves", "", {"rank0": _steps(99, 99, 99) + ENDED, "rank1": _steps(80, 80, 80) + ENDED}))


@exercise("the rank of each run", str)
def third(began):
    """Grade `began(logs)`: the rank at which a failure began, "" if there was none."""
    for what, right, logs in RUNS:
        said = began({rank: [dict(each) for each in lines] for rank, lines in logs.items()})
        if said != right:
            return f"{what}: you say {said or 'none'}; expected {right or 'none'}"
    return None
