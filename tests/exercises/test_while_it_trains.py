"""Right answers pass, wrong and unanswered ones do not; the script's data are those of its report."""

import json

import numpy as np
import torch
from exercises_kit import Answers, graded

from exercises import while_it_trains as page

# --- last_step -------------------------------------------------------------------------------------------------------


def last_step(lines, capacity):
    third, last = lines[2], lines[-1]
    grows = (last["now"] - third["now"]) // (last["step"] - third["step"])
    most = max(line["peak"] - before["now"] for before, line in zip(lines[1:], lines[2:], strict=False))
    if last["now"] + most > capacity:
        return last["step"]
    return last["step"] + 1 + (capacity - most - last["now"]) // grows


def in_a_loop(lines, capacity):
    ends = [line["now"] for line in lines][2:]
    grows, takes = ends[1] - ends[0], 0
    for k in range(2, len(lines)):
        takes = max(takes, lines[k]["peak"] - lines[k - 1]["now"])
    step, now = lines[-1]["step"], ends[-1]
    while now + takes <= capacity:
        step += 1
        now += grows
    return step


def by_arrays(lines, capacity):
    now, peak = (np.array([line[key] for line in lines]) for key in ("now", "peak"))
    grows, most = np.polyfit(np.arange(len(now) - 2), now[2:], 1)[0], (peak[2:] - now[1:-1]).max()
    return len(lines) + max(0, int(np.floor((capacity - most - now[-1]) / round(grows))) + 1)


def last_with(lines, capacity, *, since=2, begin=2, takes=max, more=1, first="peak", less=0):
    """Return what `last_step` does, with one fault."""
    last = lines[-1]
    grows = (last["now"] - lines[since]["now"]) / (last["step"] - lines[since]["step"])
    most = takes([b[first] - a["now"] for a, b in zip(lines[begin - 1:], lines[begin:], strict=False)])
    return last["step"] + max(less, more + int((capacity - most - last["now"]) // grows))


def faulty(**parts):
    return lambda lines, capacity: last_with(lines, capacity, **parts)


def by_peaks_alone(lines, capacity):
    grows = (lines[-1]["peak"] - lines[2]["peak"]) / (len(lines) - 3)
    return len(lines) + int((capacity - lines[-1]["peak"]) // grows)


# --- longest ---------------------------------------------------------------------------------------------------------


def longest(lines, capacity):
    rows, rests = lines[-1]["batch"]["shape"][0], {}
    for line in lines:
        if line["batch"]["shape"][0] == rows:
            length = line["batch"]["shape"][1]
            rests[length] = max(rests.get(length, 0), line["rest"])
    c, b, a = np.polyfit(list(rests), list(rests.values()), 2)
    room, length = capacity - sum(lines[-1]["known"].values()), max(rests)
    while round(a + b * (length + 1) + c * (length + 1) ** 2) <= room:
        length += 1
    return length


def by_lagrange(lines, capacity):
    """Exactly, through three lengths."""
    from fractions import Fraction

    rows = lines[-1]["batch"]["shape"][0]
    points = {}
    for line in sorted(lines, key=lambda line: line["rest"]):
        if line["batch"]["shape"][0] == rows:
            points[line["batch"]["shape"][1]] = line["rest"]
    three = sorted(points.items())[-3:]

    def rest(x):
        total = Fraction(0)
        for xi, yi in three:
            term = Fraction(yi)
            for xj, _ in three:
                term *= Fraction(x - xj, xi - xj) if xj != xi else 1
            total += term
        return total

    known, length = sum(lines[-1]["known"].values()), three[-1][0]
    while rest(length + 1) + known <= capacity:
        length += 1
    return length


def by_a_solved_system(lines, capacity):
    rows = lines[-1]["batch"]["shape"][0]
    kept = [line for line in lines if line["batch"]["shape"][0] == rows]
    lengths = sorted({line["batch"]["shape"][1] for line in kept})
    most = [max(line["rest"] for line in kept if line["batch"]["shape"][1] == length) for length in lengths]
    terms = np.linalg.lstsq(np.vander(lengths, 3).astype(float), np.array(most, float), rcond=None)[0]
    known = kept[-1]["peak"] - kept[-1]["rest"]
    candidates = np.arange(lengths[-1], 100 * lengths[-1])
    return int(candidates[np.polyval(terms, candidates) + known <= capacity + 0.5][-1])


def longest_with(lines, capacity, *, keep=lambda line, rows: line["batch"]["shape"][0] == rows, of=max, what="rest",
                 degree=2, known=lambda line: sum(line["known"].values()), more=0):
    """Return what `longest` does, with one fault."""
    rows, rests = lines[-1]["batch"]["shape"][0], {}
    for line in lines:
        if keep(line, rows):
            rests.setdefault(line["batch"]["shape"][1], []).append(line[what])
    terms = np.polyfit(list(rests), [of(each) for each in rests.values()], degree)
    length = 1
    while np.polyval(terms, length + 1) + known(lines[-1]) <= capacity + 0.5 and length < 10**5:
        length += 1
    return length + more


def fitting(**parts):
    return lambda lines, capacity: longest_with(lines, capacity, **parts)


# --- began -----------------------------------------------------------------------------------------------------------


def began(logs):
    failed = [(line["at"], rank) for rank, lines in logs.items() for line in lines if "failed" in line]
    if failed:
        return min(failed)[1]
    killed = {rank: max(line["peak"] for line in lines if "step" in line)
              for rank, lines in logs.items() if not any("ended" in line for line in lines)}
    return max(killed, key=killed.get) if killed else ""


def in_one_pass(logs):
    first, fullest = (float("inf"), ""), (0, "")
    for rank, lines in logs.items():
        peak = 0
        for line in lines:
            if "failed" in line and line["at"] < first[0]:
                first = line["at"], rank
            if "peak" in line:
                peak = max(peak, line["peak"])
        if "ended" not in lines[-1] and peak > fullest[0]:
            fullest = peak, rank
    return first[1] or fullest[1]


def sorted_out(logs):
    every = [(rank, line) for rank, lines in logs.items() for line in lines]
    failures = sorted((each for each in every if "failed" in each[1]), key=lambda each: each[1]["at"])
    ended = {rank for rank, line in every if "ended" in line}
    killed = sorted((each for each in every if each[0] not in ended), key=lambda each: -each[1].get("peak", 0))
    return next((rank for rank, _ in failures + killed), "")


def began_with(logs, *, key=lambda line: line["at"], fullest=lambda lines: max(x["peak"] for x in lines if "peak" in x),
               killed=lambda lines: not any("ended" in line for line in lines), pick=min):
    """Return what `began` does, with one fault."""
    failed = {rank: pick(key(line) for line in lines if "failed" in line) for rank, lines in logs.items()
              if any("failed" in line for line in lines)}
    if failed:
        return pick(failed, key=failed.get)
    left = {rank: fullest(lines) for rank, lines in logs.items() if killed(lines)}
    return max(left, key=left.get) if left else ""


def by_fault(**parts):
    return lambda logs: began_with(logs, **parts)


ANSWERS = {
    page.first: Answers(
        right=[last_step, in_a_loop, by_arrays],
        wrong=[
            (faulty(takes=lambda _: 0), "a step takes more than it leaves, and that has to fit, too"),
            (faulty(since=0, begin=2), "the first two steps make what stays, and are no growth"),
            (faulty(begin=1), "the first two steps make states, 15 steps so far, capacity 3,000: you say step 114"),
            (faulty(takes=lambda taken: taken[-1]), "another step took more above the end of the one before"),
            (faulty(takes=lambda taken: sum(taken) / len(taken)), "steps take more and less, 18 steps so far"),
            (faulty(takes=min), "steps take more and less, 18 steps so far, capacity 1,600: you say step 43; step 36"),
            (faulty(more=2), "the next one would take more than the capacity"),
            (faulty(more=0), "one more step takes no more than the capacity"),
            (by_peaks_alone, "steps take more and less"),
            (lambda lines, capacity: (capacity - lines[-1]["peak"]) // 10, "each step takes the same, 12 steps so far"),
            (lambda lines, capacity: len(lines), "you say step 12; step 81 is the last that passes"),
            (lambda lines, capacity: str(last_step(lines, capacity)), "expected a number, you return '81'")],
        same=("2 → 3", "1 → 2"),  # of the lines between which it grows: it does by the same in all
    ),
    page.second: Answers(
        right=[longest, by_lagrange, by_a_solved_system],
        wrong=[
            (fitting(degree=1), "three lengths: you say"),
            (fitting(known=lambda line: 0), "160,008 are known, and 2,000,000 is the capacity"),
            (fitting(what="peak"), "three lengths: you say"),
            (fitting(keep=lambda line, rows: True), "batches of other rows are there: you say"),
            (fitting(of=min), "steps of one length differ: the most that one took counts: you say"),
            (fitting(of=lambda rests: rests[-1]), "steps of one length differ: the most that one took counts"),
            (fitting(of=lambda rests: sum(rests) / len(rests)), "steps of one length differ: the most that one took"),
            (fitting(more=1), "three lengths: you say"),
            (lambda lines, capacity: max(line["batch"]["shape"][1] for line in lines), "three lengths: you say 30"),
            (lambda lines, capacity: 2 * longest(lines, capacity), "three lengths: you say"),
            (lambda lines, capacity: [longest(lines, capacity)], "expected a number, you return [")],
        same=("rests.get(length, 0), line[\"rest\"] → line[\"rest\"], rests.get(length, 0)", "0 → 1"),  # bytes ≥ 1
    ),
    page.third: Answers(
        right=[began, in_one_pass, sorted_out],
        wrong=[
            (lambda logs: next(iter(logs)), "one failed, the others were killed by the launcher: you say rank0"),
            (lambda logs: max(logs, key=lambda rank: max(x.get("peak", 0) for x in logs[rank])),
             "one failed, the others were killed by the launcher: you say rank0; expected rank2"),
            (by_fault(pick=max), "two failed, in the same step: you say rank0"),
            (by_fault(key=lambda line: line["step"]), "two failed, in the same step: you say rank0"),
            (by_fault(key=lambda line: (line["step"], line["at"])), "the one that failed first was a step ahead: you "
                                                                   "say rank1"),
            (by_fault(killed=lambda lines: True), "no request failed, and two were killed: you say rank0"),
            (by_fault(killed=lambda lines: False), "no request failed, and two were killed: you say none"),
            (by_fault(fullest=lambda lines: lines[-1]["peak"]), "no request failed, and two were killed: you say rank"),
            (lambda logs: began(logs) or next(iter(logs)), "all ended by themselves: you say rank0; expected none"),
            (lambda logs: began({rank: lines for rank, lines in logs.items() if {"ended": "by itself", "at": 9.0}
                                 not in lines}), "a failure that the script caught came first: you say rank1"),
            (lambda logs: began(logs) or None, "not answered yet")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_one_batch_is_far_longer_than_those_before_it(tmp_path):
    page.write_rows(tmp_path / "rows.pt")
    shapes = [tuple(rows.shape) for rows in torch.load(tmp_path / "rows.pt")]
    assert len(shapes) == page.STEPS and shapes[page.AT - 1] == (page.ROWS, page.LONG + 1)
    assert max(length for _, length in shapes[:page.AT - 1]) == page.SHORT + 1
    assert {rows for rows, _ in shapes} == {page.ROWS}


def test_a_report_is_read_where_there_is_one(tmp_path):
    assert page.report(tmp_path)["request"] == 4 * 32 * 8 * 512**2
    (tmp_path / "rank0.failure1.json").write_text(json.dumps({"request": 3}))
    assert page.report(tmp_path) == {"request": 3}
