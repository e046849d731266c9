"""One rehearsal, in a process of its own: `python -m refimpl.rehearse.child OPTIONS SCRIPT [args]`.

OPTIONS is JSON: "device" (what phantom.start takes), "world", "rank", "steps", "numbers", "snapshot", "result" (where
JSON is written: what came of it, or why it "cannot").
The device comes first, then torch, then the script as `__main__`. The process ends with the script's own status, or 0
once its steps are made; an out-of-memory error that the rehearsal is about is no failure of it: 0, too.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from .. import phantom


def main():
    """Rehearse, and write what came of it."""
    options, path, *arguments = json.loads(sys.argv[1]), *sys.argv[2:]
    try:
        phantom.start(**options["device"], numbers=options["numbers"])
    except (ValueError, phantom.CannotBuild) as error:
        Path(options["result"]).write_text(json.dumps({"cannot": str(error)}))
        sys.exit(1)
    import torch

    from ..explain.script import Script
    from ..phantom import numbers

    if options["world"]:
        from ..phantom import group

        group.pretend(options["world"], options["rank"])
    if options["snapshot"]:
        torch.cuda.memory._record_memory_history(context="all", stacks="python")
    torch.cuda.init()  # 2.11 has no peak to reset before
    script = Script(path, arguments)
    rehearsal = Rehearsal(options["steps"], with_numbers=options["numbers"])
    began = time.perf_counter()
    with rehearsal:
        found = rehearsal.run(script)
    found |= {"seconds": time.perf_counter() - began, "words": phantom.words(torch.__version__),
              "missing": dict(numbers.missing), "world": options["world"], "rank": options["rank"]}
    if options["snapshot"]:
        torch.cuda.memory._dump_snapshot(options["snapshot"])
    Path(options["result"]).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.exit(found["status"])


class Rehearsal:
    """Runs a Script for some steps of its optimizers, and reads PyTorch's allocator at each: a context around it."""

    def __init__(self, steps, with_numbers):
        from ..explain.steps import Steps
        from .files import Guard
        from .values import Watch

        self.readings, self.failed, self._watch = [], None, Watch()
        self._contexts = [] if with_numbers else [self._watch, Guard()]
        self._steps = Steps(steps, self._stepped, lambda: None, lambda: None)

    def __enter__(self):
        for context in (*self._contexts, self._steps):
            context.__enter__()
        return self

    def __exit__(self, *exception):
        for context in (self._steps, *reversed(self._contexts)):
            context.__exit__(*exception)

    def run(self, script):
        """Return what came of it as a dict that JSON can hold."""
        import torch

        ending = script.run()
        if isinstance(ending.error, torch.OutOfMemoryError):
            self.failed = out_of_memory(ending.error, self._steps.count + 1)
        if ending.how != "steps":  # what was taken since the last step, or before the first
            self.readings.append(reading())
        status = 0 if self._steps.done or self.failed else ending.status
        if ending.text and not self._steps.done and not self.failed:
            sys.stderr.write(ending.text)
        return {"steps": self.readings, "made": self._steps.count, "by class": dict(self._steps.by_class),
                "ending": ending.how, "said": ending.words, "status": status, "out of memory": self.failed,
                "read": dict(self._watch.read), "devices": torch.cuda.device_count()}

    def _stepped(self, optimizer):
        import torch

        self._watch.stepped()
        self.readings.append(reading())
        for i in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(i)


def out_of_memory(error, step):
    """Return PyTorch's words, the step, and the innermost line of the user's that asked for too much."""
    ours = str(Path(__file__).resolve().parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((ours, "<")) and "site-packages" not in frame.filename]
    place = frames[-1].filename.removeprefix(f"{Path.cwd()}/") if frames else ""
    line = f"{place}:{frames[-1].lineno}: {frames[-1].line}" if frames else None
    return {"message": str(error), "step": step, "line": line}


def reading():
    """Return what PyTorch's allocator took at most on the device that took most: {"allocated", "requested", "reserved"}
    since the last reset, and "now"."""
    import torch

    stats = [torch.cuda.memory_stats(i) for i in range(torch.cuda.device_count())]
    names = {"allocated": "allocated_bytes.all.peak", "requested": "requested_bytes.all.peak",
             "reserved": "reserved_bytes.all.peak", "now": "allocated_bytes.all.current"}
    found = [{name: each.get(key, 0) for name, key in names.items()} for each in stats]
    return max(found, key=lambda each: each["reserved"])


if __name__ == "__main__":
    main()
