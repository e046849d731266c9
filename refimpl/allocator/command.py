"""`refimpl replay SNAPSHOT`: what was reserved, what failed and why, and which setting would have helped."""

import argparse

from .recorded import compare
from .replay import explain
from .rewind import capacity_of, trace_of
from .settings import Settings
from .snapshot import Snapshot

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="a file of torch.cuda.memory._dump_snapshot")
    parser.add_argument("--device", type=int, help="its index; default: the first that recorded")
    parser.add_argument("--capacity", type=size, metavar="SIZE",
                        help="memory that the allocator may reserve, as 24GiB; default: what it had when a request "
                             "failed, else 80GiB")
    parser.add_argument("--settings", metavar="TEXT",
                        help="as in PYTORCH_CUDA_ALLOC_CONF; default: those of the recording")


def size(text):
    """Read "24GiB", "512MiB" or bytes. argparse's ArgumentTypeError for anything else, and for less than a byte."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        nbytes = int(float(text.removesuffix(unit)) * UNITS[unit]) if unit else int(text)
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"invalid size value: {text!r}: expected 24GiB, 512MiB, 64KiB or a number of "
                                         "bytes")
    return nbytes


def run(arguments, parser):
    """Print the replay of a snapshot. Ends with the parser's error if the file, a size or a setting is none."""
    try:
        for line in lines(arguments):
            print(line)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def lines(arguments):
    """Go through the lines that the command prints."""
    snapshot = Snapshot.load(arguments.snapshot, arguments.device)
    if not snapshot.entries:
        raise ValueError(f"{arguments.snapshot} has no events of device {snapshot.device}: expected a recording; call "
                         "torch.cuda.memory._record_memory_history() before the training, _dump_snapshot after it")
    text = snapshot.settings if arguments.settings is None else arguments.settings
    recorded = Settings.parse(snapshot.settings)
    yield (f"device {snapshot.device}, settings {snapshot.settings or 'none'}, {snapshot.reserved:,} bytes reserved at "
           "the end")
    yield f"beside the recording: {compare(snapshot, recorded)!r}"
    failed = capacity_of(snapshot, recorded)
    capacity = arguments.capacity or failed or 80 * 2**30
    trace = trace_of(snapshot, recorded)
    yield f"replayed with {capacity:,} bytes, settings {text or 'none'}:"
    found = explain(trace, capacity=capacity, settings=text)
    yield repr(found)
    yield f"no allocator could do with less than {trace.peak:,} bytes"
