"""What is known of a request that failed: who asked, how much must go, what is live, what the allocator recorded."""

import pickle
import re
import sys
import threading
import traceback
from dataclasses import dataclass, field

import torch

from ..allocator.recording_start import capacity_of, trace_of
from ..allocator.replaying import explain
from ..allocator.settings import Settings
from ..allocator.snapshot import Snapshot
from ..memory.tracking.lines import line_of, users
from .live import Live, line_of_frames, live
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
    lines_of_models: dict = field(default_factory=dict)

    @property
    def missing(self):
        """Return the bytes that must go."""
        return self.request - self.device.get("free", 0)

    def line_of_model(self, model):
        """Return the line that made the first of a model's weights, "" if it is not known."""
        return self.lines_of_models.get(id(model), "")


def asked_in(error, threads=None):
    """Return (line, function) of the program's that asked for too much: of an error's traceback, or of the threads."""
    if error is not None:
        frames = list(reversed([*traceback.walk_tb(error.__traceback__)]))
        frames += list(traceback.walk_stack(None))
    else:
        frames = list(traceback.walk_stack(None))
        if (found := users(frames)) is None:  # a thread of autograd's: the main one waits for it
            frames = list(traceback.walk_stack(sys._current_frames()[threading.main_thread().ident]))
    found = users(frames)
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
    """Look at what is live, and at what the allocator recorded."""
    facts.device = meter.state()
    segments = snapshot["segments"] if snapshot else None
    facts.live = live(facts.known, meter.device, segments)
    if segments:
        facts.lines_of_models = _lines_of_models(facts, segments)


def _lines_of_models(facts, segments):
    lines = {}
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            lines[at] = block.get("frames", ())
            at += block["size"]
    found = {}
    for model in facts.known.models:
        first = next((lines[p.untyped_storage().data_ptr()] for p in model.parameters()
                      if p.untyped_storage().data_ptr() in lines), ())
        found[id(model)] = str(line_of_frames(first) or "")
    return found


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
