"""What is known of a request that failed: who asked, how much must go, what is live, what the allocator recorded."""

import pickle
import re
import sys
import threading
import traceback
from dataclasses import dataclass, field
from itertools import chain

import torch

from ..allocator.recording_start import capacity_of, trace_of
from ..allocator.replaying import explain
from ..allocator.settings import Settings
from ..allocator.snapshot import Snapshot
from ..memory.tracking.lines import line_of, users
from .live import Live, live
from .longest_batch import LongestBatch

OF_CPU = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.,]+) ?(\w+)")
UNITS = {"bytes": 1, "byte": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
OF_ONEDNN, LITTLE = "could not create a primitive", 2**26  # it says the same of what it does not support
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED",
         "Resource temporarily unavailable")  # the last: of a thread that could not begin


def is_of_memory(error, free):
    """Tell whether an error says that memory is not enough. `free()`: how many bytes there are."""
    if isinstance(error, RuntimeError) and OF_ONEDNN in str(error):
        return free() < LITTLE
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))


@dataclass
class Facts:
    """What is known when a request fails. Bytes: `request`; `missing`, that must go for it to pass, 0 or less if enough
    is free; `device`, as the meter's `state()`. `running`: the function of the program that asked."""

    rank: int
    world: int
    step: int
    phase: str
    known: object
    request: int = 0
    line: str = ""
    running: str = ""
    message: str = ""
    device: dict = field(default_factory=dict)
    batch: tuple | None = None
    before: LongestBatch | None = None
    growth: tuple | None = None
    traced: dict | None = None
    phases: dict = field(default_factory=dict)
    recomputed_without: bool = False
    live: Live = field(default_factory=Live)
    settings: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)

    @property
    def missing(self):
        """Return the bytes that must go."""
        return self.request - self.device.get("free", 0)


def asked_in(error):
    """Return (line, function) of the program's that asked for too much: of an error's traceback, or of what runs."""
    main = sys._current_frames()[threading.main_thread().ident]  # waits for a thread of autograd's
    raised = reversed([*traceback.walk_tb(error and error.__traceback__)])
    found = users(chain(raised, traceback.walk_stack(sys._getframe()), traceback.walk_stack(main)))
    if found is None:
        return "", ""
    frame, number = found
    line = line_of(frame.f_code.co_filename, number)
    return f"{line}: {line.text}", frame.f_code.co_name


def bytes_of(error):
    """Return the bytes that an error of the CPU's says were asked for, 0 if it does not."""
    found = OF_CPU.search(str(error))
    return int(float(found[1].replace(",", "")) * UNITS.get(found[2], 0)) if found else 0


def fill(facts, meter, snapshot=None):
    """Look at what is live, and at what the allocator has."""
    facts.device = meter.state()
    facts.live = live(facts.known, meter.device, snapshot and snapshot["segments"])


def replayed(facts, recording, path):
    """Write what the allocator recorded, as `torch.cuda.memory._dump_snapshot` does, and note which of its other
    settings let the request pass."""
    with open(path, "wb") as file:
        pickle.dump(recording, file)
    try:
        snapshot = Snapshot.load(path)
        settings = Settings.of(snapshot)
        capacity, trace = capacity_of(snapshot, settings), trace_of(snapshot, settings)
        capacity = min(capacity or facts.device["capacity"], facts.device["capacity"])  # a limit may be below it
        if trace.peak <= capacity:
            found = explain(trace, capacity=capacity, settings=settings)
            facts.settings = {} if found.failure is None else found.failure.cures
    except (ValueError, OSError) as error:
        facts.notes.append(f"what the allocator recorded could not be replayed: {error}")
