"""The two instruments laid over each other: what kernels took and gave back inside single operations.

The tracker knows what every operation returned and when; the CPU allocator's log knows every allocation and when.
What was taken after one operation had been noted and before the next one was, and is not in what that returned, is
its workspace.
"""

from bisect import bisect_left

from .trace import StorageRecord, Trace

WORKSPACE = "kernel workspace"


def with_workspaces(trace, measurement):
    """`trace` with the workspaces that `measurement` saw inside its operations, as a category of their own.

    `with memory.track(…) as t, memory.measure("cpu") as m: step()`, then `memory.with_workspaces(t, m)`: a Trace
    whose peak is the allocator's, and whose `top(by="operation")` names the kernels. Its operation k holds the
    largest prefix sum of the allocator's log between operations k−1 and k, above the sum at its end. ValueError for a
    measurement without a log (CUDA's allocator keeps none by default).
    """
    log = getattr(measurement, "events", None)
    if log is None:
        raise ValueError(f"{type(measurement).__name__} has no log of allocations: measure on the CPU")
    records, events = list(trace.records), list(trace.events)
    times, begin = [ns for ns, _ in log], 0
    for index, op in enumerate(trace.ops):
        end = bisect_left(times, op.time_ns, lo=begin)
        nbytes = _workspace([nbytes for _, nbytes in log[begin:end]])
        begin = end
        if nbytes:
            record = StorageRecord("cpu", op.name, op.phase, op.module, index, nbytes, alive=False, mark=WORKSPACE)
            records.append(record)
            events += [(index, len(records) - 1, nbytes), (index + 1, len(records) - 1, -nbytes)]
    return Trace(trace.ops, records, events, trace.first_call, "cpu")


def _workspace(changes):
    """How far the sum of `changes` rose above where it ended, counting from the first allocation on."""
    held, highest = 0, None
    for nbytes in changes:
        held += nbytes
        if nbytes > 0:
            highest = held if highest is None else max(highest, held)
    return 0 if highest is None else max(highest - held, 0)
