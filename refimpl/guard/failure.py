"""The report of a failed request: on the disk before the error goes on.

    rank0.failure1.txt    for a person
    rank0.failure1.json   the same for programs
    rank0.failure1.pickle on a GPU: the allocator's recording, for pytorch.org/memory_viz and `refimpl replay`
"""

import json
import os
import pickle
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..allocator.recording_start import capacity_of, trace_of
from ..allocator.replaying import explain
from ..allocator.settings import Settings
from ..allocator.snapshot import Snapshot
from ..common.ledger import GRADIENTS, OPTIMIZER_STATE, human
from ..explain.helps import TECHNIQUES
from ..explain.helps.row import RANKS
from ..memory.tracking.lines import line_of, users
from ..untrusted.text import one_line
from .causes import causes
from .live import Live, live

SCHEMA = 1
OF_CPU = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.,]+) ?(\w+)")
UNITS = {"bytes": 1, "byte": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_of_memory(error):
    """Tell whether an error says that memory is not enough."""
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
    longest_before: int = 0
    growth: tuple | None = None
    grows: list = field(default_factory=list)
    since: int = 0
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
    from .live import line_of_frames

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


def replayed(facts, path):
    """Note which other settings of the allocator let the request pass, by the recording in a file."""
    try:
        snapshot = Snapshot.load(path, facts.device.get("index"))
        settings = Settings.of(snapshot)
        capacity, trace = capacity_of(snapshot, settings), trace_of(snapshot, settings)
        if capacity and trace.peak <= capacity:
            found = explain(trace, capacity=capacity, settings=settings)
            facts.settings = {} if found.failure is None else found.failure.cures
    except (ValueError, OSError) as error:
        facts.notes.append(f"what the allocator recorded could not be replayed: {error}")


def as_dict(facts):
    """Return the report as lists, dicts, texts and numbers."""
    missing = max(0, facts.missing)
    return {"schema": SCHEMA, "rank": facts.rank, "world": facts.world, "step": facts.step, "phase": facts.phase,
            "at": time.time(), "message": facts.message, "request": facts.request, "line": facts.line,
            "device": facts.device, "missing": missing, "batch": facts.batch,
            "causes": [each._asdict() for each in causes(facts)], "live": facts.live.as_dict(),
            "settings": facts.settings, "helps": _helps(facts, missing), "phases": facts.phases,
            "traced": facts.traced and {key: facts.traced[key] for key in ("of steps", "top", "ledger", "grows", "kept")
                                        if key in facts.traced},
            "notes": facts.notes, "versions": versions()}


def versions():
    """Return the versions of Python, torch and the libraries of models that are loaded."""
    names = ("torch", "transformers", "accelerate", "peft", "timm", "lightning", "deepspeed", "refimpl")
    found = {name: getattr(sys.modules[name], "__version__", "?") for name in names if name in sys.modules}
    return {"python": sys.version.split()[0], "cuda": torch.version.cuda, **{k: str(v) for k, v in found.items()}}


def _helps(facts, missing):
    """List what techniques save at least, most first: as a recorded step has it, else by the states that are there."""
    by_name = {each.name: each for each in TECHNIQUES}
    if facts.traced and "helps" in facts.traced:
        found = [(each["name"], each["saves"], each["call"]) for each in facts.traced["helps"]
                 if each["saves"] and not each["bound"]]
    else:
        states, gradients = (facts.live.ledger.get(name, 0) for name in (OPTIMIZER_STATE, GRADIENTS))
        found = [("offload", states + gradients, ""), ("zero1", states * (RANKS - 1) // RANKS, ""),
                 ("zero2", (states + gradients) * (RANKS - 1) // RANKS, "")]
    return [{"name": name, "title": by_name[name].title, "saves": saves, "enough": saves >= missing,
             "call": by_name[name].call, "cost": by_name[name].cost}
            for name, saves, _ in sorted(found, key=lambda each: -each[1]) if saves]


def text(report, files=()):
    """Return the report for a person."""
    device, ledger = report["device"], report["live"]["ledger"]
    parts = [f"rank {report['rank']} of {report['world']}, step {report['step']}, {report['phase']}: "
             f"{report['request']:,} bytes were asked for" + (f" at {report['line']}" if report["line"] else ""),
             one_line(report["message"])]
    parts.append("why\n" + "\n".join(
        "\n".join([f"  {n}. {one_line(each['what'])}",
                   *(f"     at {one_line(each['line'])}" for _ in range(bool(each["line"]))),
                   *(f"     {one_line(each['cure'])}" for _ in range(bool(each["cure"])))])
        for n, each in enumerate(report["causes"], 1)))
    room = (f"{report['missing']:,} bytes must go" if report["missing"] else
            "enough is free, but not in one piece" if device["largest free"] < report["request"] else "enough is free")
    parts.append(f"of {human(device['capacity'])}: allocated {human(device['allocated'])}, reserved "
                 f"{human(device['reserved'])}, free {human(device['free'])}, the largest piece "
                 f"{human(device['largest free'])}, of others {human(device['by others'])}: {room}")
    parts.append(_rows("live, by category", [(name, nbytes, 0) for name, nbytes in ledger.items()]))
    for title, key in (("by line", "lines"), ("by module", "modules")):
        parts.append(_rows(title, report["live"][key]))
    parts.append(_rows("who holds what is no weight, gradient or state",
                       [(each["holder"], each["nbytes"], each["count"]) for each in report["live"]["holders"]]))
    if traced := report["traced"]:
        for by in ("line", "module"):
            parts.append(_rows(f"by {by}, at the peak of steps {traced['of steps']}, which ran under the tracker",
                               [(name, nbytes, 0) for name, nbytes in traced["top"][by]]))
    if report["settings"]:
        parts.append("the allocator's recording, replayed with other settings\n" + "\n".join(
            f"  {name}: {'passes' if passes else 'fails, too'}" for name, passes in report["settings"].items()))
    if report["helps"]:
        parts.append("what saves at least so much\n" + "\n".join(
            f"  {each['saves']:>17,}  {'enough' if each['enough'] else '      '}  {each['title']}: {each['call']}"
            for each in report["helps"]))
    parts.append(_rows("by phase of this step, each at its peak", [(k, n, 0) for k, n in report["phases"].items()]))
    batch = "x".join(map(str, report["batch"])) if report["batch"] else "not known"
    parts.append(f"batch {batch}; " + ", ".join(f"{name} {each}" for name, each in report["versions"].items()))
    parts += [f"note: {one_line(each)}" for each in report["notes"]]
    parts += [f"wrote {one_line(path)}" for path in files]
    return "\n\n".join(filter(None, parts)) + "\n"


def _rows(title, rows):
    if not rows:
        return ""
    width = max(len(f"{nbytes:,}") for _, nbytes, _ in rows)
    return f"{title}\n" + "\n".join(f"  {nbytes:>{width},}  {one_line(words)}" + (f"  × {count:,}" if count > 1 else "")
                                    for words, nbytes, count in rows)


def write(report, stem, snapshot=None):
    """Write the files beginning with `stem`; return their paths. OSError where the disk is full."""
    written = []
    path = Path(f"{stem}.json")
    _write(path, json.dumps(report, indent=1) + "\n")
    written.append(path)
    path = Path(f"{stem}.txt")
    _write(path, text(report))
    return [path, *written]


def write_snapshot(snapshot, path):
    """Write an allocator's recording, as `torch.cuda.memory._dump_snapshot` does."""
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
    return path


def _write(path, words):
    with open(path, "w", encoding="utf-8") as file:
        file.write(words)
        file.flush()
        os.fsync(file.fileno())
