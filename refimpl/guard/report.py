"""The report of a failed request, for a person and for programs.

    rank0.failure1.txt    for a person
    rank0.failure1.json   the same for programs
    rank0.failure1.pickle on a GPU: the allocator's recording, for pytorch.org/memory_viz and `refimpl replay`
"""

import importlib.metadata
import json
import os
import sys
import time

import torch

from ..common.ledger import GRADIENTS, OPTIMIZER_STATE, human
from ..explain.helps import TECHNIQUES
from ..explain.helps.row import RANKS
from ..untrusted.text import one_line
from .causes import causes

SCHEMA = 1
LIBRARIES = "torch", "transformers", "accelerate", "peft", "timm", "lightning", "deepspeed", "refimpl"


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
    found = {}
    for name in LIBRARIES:
        try:
            found |= {name: importlib.metadata.version(name)} if name in sys.modules else {}
        except importlib.metadata.PackageNotFoundError:  # it is on the path, and not installed
            pass
    return {"python": sys.version.split()[0], "cuda": torch.version.cuda, **found}


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


def text(report):
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
    return "\n\n".join(filter(None, parts)) + "\n"


def _rows(title, rows):
    if not rows:
        return ""
    width = max(len(f"{nbytes:,}") for _, nbytes, _ in rows)
    return f"{title}\n" + "\n".join(f"  {nbytes:>{width},}  {one_line(words)}" + (f"  × {count:,}" if count > 1 else "")
                                    for words, nbytes, count in rows)


def write(report, stem):
    """Write the two files whose names begin with `stem`; return the path of the text. OSError where the disk is full.
    """
    for suffix, words in ((".json", json.dumps(report, indent=1) + "\n"), (".txt", text(report))):
        with open(f"{stem}{suffix}", "w", encoding="utf-8") as file:
            file.write(words)
            file.flush()
            os.fsync(file.fileno())
    return f"{stem}.txt"
