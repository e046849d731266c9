"""`refimpl replay SNAPSHOT`: what was live, by line; what failed and why, and which setting would have helped."""

from collections import Counter

import numpy as np

from ..common.allocations import ALLOC
from ..untrusted.text import one_line, print_text, refuse, size
from .recording_comparison import compare
from .recording_start import capacity_of, line, trace_of
from .replaying import explain
from .settings import WITHOUT_EFFECT, Settings, items
from .snapshot import LIVE, Snapshot

LINES = 12  # of the table of what is live


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="a file of torch.cuda.memory._dump_snapshot")
    parser.add_argument("--device", type=int, help="its index; default: the first that recorded")
    parser.add_argument("--capacity", type=size, metavar="SIZE",
                        help="memory that the allocator may reserve, as 24GiB; default: what it had when a request "
                             "failed, else 80GiB")
    parser.add_argument("--settings", metavar="TEXT",
                        help="as in PYTORCH_CUDA_ALLOC_CONF; default: those of the recording")


def run(arguments, parser):
    """Print the replay of a snapshot. Ends with one line and status 2 if the file or a setting is none."""
    try:
        for line in lines(arguments):
            print_text(line)
    except (ValueError, OSError) as error:
        refuse(parser, error)


def lines(arguments):
    """Go through the lines that the command prints: what was live first, then what settings could do about it."""
    snapshot = Snapshot.load(arguments.snapshot, arguments.device)
    if not snapshot.entries:
        yield from of_segments(snapshot, arguments.snapshot)
        return
    recorded = Settings.of(snapshot)
    text = snapshot.settings if arguments.settings is None else arguments.settings
    failed, trace = capacity_of(snapshot, recorded), trace_of(snapshot, recorded)
    capacity = arguments.capacity or failed or 80 * 2**30
    at = int(np.argmax(trace.live_bytes)) if failed is None else failure_in(snapshot, trace)
    yield from by_line(live_at(trace, at + 1), "at the peak" if failed is None else "when a request failed, with it")
    yield ""
    yield (f"device {snapshot.device}, settings {one_line(snapshot.settings) or 'none'}; by the rules of "
           f"torch {recorded.version}: {compare(snapshot, recorded)!r}")
    yield f"replayed with {capacity:,} bytes, settings {one_line(text) or 'none'}:"
    if trace.peak > capacity:
        yield (f"no setting can help: {trace.peak:,} bytes are live at once, so {trace.peak - capacity:,} bytes "
               "must go, of the lines above")
        return
    yield repr(explain(trace, capacity=capacity, settings=Settings.parse(text, version=recorded.version)))
    yield f"no allocator could do with less than {trace.peak:,} bytes"
    if ignored := sorted({item[0] for item in items(text)} & WITHOUT_EFFECT):
        yield f"{one_line(', '.join(ignored))}: without an effect on addresses, and ignored"


def of_segments(snapshot, path):
    """Go through the lines about a snapshot without events: what its segments hold."""
    if not snapshot.segments:
        raise ValueError(f"{path} has neither events nor segments of device {snapshot.device}: call "
                         "torch.cuda.memory._record_memory_history() before the training, _dump_snapshot after it")
    blocks = [block for segment in snapshot.segments for block in segment["blocks"]]
    live = [(block["requested_size"], line(block.get("frames", ()))) for block in blocks if block["state"] in LIVE]
    yield from by_line(live, "at the end")
    free = [block["size"] for block in blocks if block["state"] not in LIVE]
    yield (f"\n{snapshot.reserved:,} bytes reserved, {sum(free):,} of these free, the largest hole has "
           f"{max(free, default=0):,}. It has no events: to see what failed, call "
           "torch.cuda.memory._record_memory_history() before the training")


def by_line(live, when):
    """Go through the table of what is live, [(bytes, line)]: the lines with most first."""
    total, bytes_of, count = sum(nbytes for nbytes, _ in live), Counter(), Counter(name for _, name in live)
    for nbytes, name in live:
        bytes_of[name] += nbytes
    yield f"live {when}: {total:,} bytes in {len(live):,} blocks"
    for name, nbytes in bytes_of.most_common(LINES):
        yield (f"{nbytes:>17,}  {nbytes / max(total, 1):>6.1%}  {count[name]:>6,} ×  "
               f"{one_line(name) or 'no line was recorded'}")
    if len(bytes_of) > LINES:
        rest = total - sum(nbytes for _, nbytes in bytes_of.most_common(LINES))
        yield f"{rest:>17,}  {rest / total:>6.1%}  {len(bytes_of) - LINES:>6,} other lines"


def live_at(trace, events):
    """Return what is live after so many events of a trace: [(bytes, name)]."""
    live = {}
    for action, block, *_ in trace.events[:events].tolist():
        if action == ALLOC:
            live[block] = int(trace.blocks["nbytes"][block]), trace.name_of(block)
        else:
            del live[block]
    return list(live.values())


def failure_in(snapshot, trace):
    """Return which event of `trace_of(snapshot)` is the first request that failed."""
    counted = {"alloc": 1, "free_completed": 1}
    first = next(i for i, entry in enumerate(snapshot.entries) if entry["action"] == "oom")
    there = len(trace) - sum(counted.get(entry["action"], 2 * (entry["action"] == "oom")) for entry in snapshot.entries)
    return there + sum(counted.get(entry["action"], 0) for entry in snapshot.entries[:first])
