"""The two instruments laid over each other: what kernels took and gave back inside single operations.

The tracker knows what every operation returned and when; the CPU allocator's log knows every allocation and when.
What was taken after one operation had been noted and before the next one was, and is not in what that returned, is
its workspace.
"""

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from ..common.ledger import human
from .trace import StorageRecord, Trace
from .tracking.taking import NOT_COUNTED, WORKSPACE

if TYPE_CHECKING:
    from .allocator import CPUMeasurement, CUDAMeasurement

UNSEEN = "of other threads, or without an operation"  # a category
_ELSEWHERE = {"lift_fresh", "set_", "frombuffer", "from_dlpack"}  # their tensors may lie in memory of another library


def with_workspaces(trace: Trace, measurement: "CUDAMeasurement | CPUMeasurement") -> Trace:
    """Add to `trace` the workspaces that `measurement` saw inside its operations, as a category of their own.

    `with memory.track(…) as t, memory.measure("cpu") as m: step()`, then `memory.with_workspaces(t, m)`: a Trace
    whose peak is the allocator's, and whose `top(by="operation")` names the kernels. Its operation k holds the
    largest prefix sum of the allocator's log between operations k−1 and k, above the sum at its end. ValueError for a
    measurement without a log (CUDA's allocator keeps none by default), one that has not ended, and one of another
    region than the trace's.
    """
    log = getattr(measurement, "events", None)
    if log is None:
        raise ValueError(f"{type(measurement).__name__} has no log of allocations: measure on the CPU, and to the end")
    _check_same_region(trace, log, _spans(trace.ops, log))
    return with_those_of_a_log(trace, log)


def with_those_of_a_log(trace: Trace, log: list[tuple[int, int]]) -> Trace:
    """Add to `trace` the workspaces of its operations, as `log`, [(ns, ± bytes)], has them."""
    records, events = list(trace.records), list(trace.events)
    for index, (op, changes) in enumerate(zip(trace.ops, _spans(trace.ops, log), strict=True)):
        nbytes = _workspace(changes)
        if nbytes:
            record = StorageRecord("cpu", op.name, op.phase, op.module, index, nbytes, alive=False, mark=WORKSPACE)
            records.append(record)
            # alive during one operation only
            events += [(index, len(records) - 1, nbytes), (index + 1, len(records) - 1, -nbytes)]
    notes = [note for note in trace.notes if not note.startswith(NOT_COUNTED)]
    return Trace(trace.ops, records, events, trace.first_call, "cpu", trace.began_ns, notes)


def with_unseen(trace: Trace, log: list[tuple[int, int]]) -> Trace:
    """Add to `trace` what `log` has at the end of an operation and no record has: tensors of the program's own threads,
    buffers that C++ allocates. Changes of less than a thousandth of the peak are not followed."""
    records, events, totals = list(trace.records), list(trace.events), trace.timeline.totals
    least, held, number = max(int(totals.max()) // 1000, 1), 0, None
    for index, changes in enumerate(_spans(trace.ops, log)):
        held += sum(changes)
        unseen = max(held - int(totals[index + 1]), 0)
        known = records[number].nbytes if number is not None else 0
        if abs(unseen - known) < least:
            continue
        if number is not None:
            events.append((index, number, -known))
        number = None
        if unseen >= least:
            number, op = len(records), trace.ops[index]
            records.append(StorageRecord("cpu", op.name, op.phase, "", index, unseen, mark=UNSEEN))
            events.append((index, number, unseen))
    return Trace(trace.ops, records, events, trace.first_call, "cpu", trace.began_ns, trace.notes)


def _spans(ops, log):
    """List, for each operation, the changes in `log` from the end of the operation before to its own end."""
    times, spans, begin = [ns for ns, _ in log], [], 0
    for op in ops:
        end = bisect_left(times, op.time_ns, lo=begin)
        spans.append([nbytes for _, nbytes in log[begin:end]])
        begin = end
    return spans


def _check_same_region(trace, log, spans):
    """Raise ValueError unless trace and log are of one region: what the trace saw was born while the log was kept, and
    the other way round. Two regions differ by most of their bytes; clocks are given a hundredth."""
    taken = [ns for ns, nbytes in log if nbytes > 0]
    first, last = (taken[0], taken[-1]) if taken else (float("inf"), 0)
    born = Counter()
    for index, record, delta in trace.events:
        if index >= 0 and delta > 0 and trace.records[record].device == "cpu":
            born[index] += delta
    unseen = sum(nbytes for index, nbytes in born.items() if trace.ops[index].name not in _ELSEWHERE and (
        trace.ops[index].time_ns < first or (trace.ops[index - 1].time_ns if index else 0) > last))
    outside = _taken(nbytes for _, nbytes in log) - sum(map(_taken, spans))
    outside += _taken(nbytes for ns, nbytes in log if trace.began_ns and ns < trace.began_ns)
    if unseen + outside > 0.01 * born.total():
        raise ValueError(f"the trace and the measurement are of two regions: {human(unseen)} of what the trace saw is "
                         f"not in the measurement's log, {human(outside)} of the log was taken outside the trace. Put "
                         "both around the same code: with memory.track(…) as t, memory.measure(\"cpu\") as m: …")


def _taken(changes):
    return sum(nbytes for nbytes in changes if nbytes > 0)


def _workspace(changes):
    """Return how far the sum of `changes` rose above where it ended, from the first allocation on."""
    held, highest = 0, None
    for nbytes in changes:
        held += nbytes
        if nbytes > 0:
            highest = held if highest is None else max(highest, held)
    return 0 if highest is None else max(highest - held, 0)
