"""One rehearsal, in a process of its own: `python -m refimpl.rehearse.child OPTIONS SCRIPT [args]`.

OPTIONS is JSON: "device" (what phantom.start takes), "world", "rank", "steps", "numbers", "snapshot", "module" (whether
SCRIPT is a module's name), "result" (where JSON is written: what came of it, or why it "cannot").
The device comes first, then torch, then the script as `__main__`. The process ends with the script's own status, or 0
once its steps are made.
"""

import json
import linecache
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

    from ..explain.script import Module, Script
    from ..phantom import numbers

    if options["world"]:
        from ..phantom import group

        group.pretend(options["world"], options["rank"])
    if options["snapshot"]:  # once CUDA is begun: the script may set PYTORCH_ALLOC_CONF before
        torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history(context="all", stacks="python"))
    script = (Module if options["module"] else Script)(path, arguments)
    rehearsal = Rehearsal(**{key: options[key] for key in ("steps", "numbers", "world", "rank", "snapshot")})
    began = time.perf_counter()
    with rehearsal:
        found = rehearsal.run(script)
    found |= {"seconds": time.perf_counter() - began, "words": phantom.words(torch.__version__),
              "missing": dict(numbers.missing), "world": options["world"], "rank": options["rank"]}
    Path(options["result"]).write_text(json.dumps(found))
    if options["snapshot"]:
        torch.cuda.memory._dump_snapshot(options["snapshot"])
    sys.stdout.flush()
    sys.exit(found["status"])


class Rehearsal:
    """Runs a Script for some steps of its optimizers, and reads PyTorch's allocator at each: a context around it."""

    def __init__(self, steps, numbers, world, rank, snapshot):
        from ..explain.steps import Steps
        from ..memory.peaks import Peaks
        from .file_guard import FileGuard
        from .processes import OneOf
        from .value_guard import ValueGuard

        self.readings, self.failed = [], None
        self._watch, self._guard, self._peaks = ValueGuard(), FileGuard(snapshot), Peaks()
        self._contexts = [self._peaks, OneOf(world, rank), *([] if numbers else [self._guard, self._watch])]
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
            self.readings.append(self._peaks.since_the_last())
        status = 0 if self._steps.done else ending.status
        if ending.text and not self._steps.done and not self.failed:
            sys.stderr.write(ending.text)
        return {"steps": self.readings, "made": self._steps.count, "by class": dict(self._steps.by_class),
                "ending": ending.how, "said": self._watch.waits or ending.words, "status": status,
                "out of memory": self.failed, "read": dict(self._watch.read), "new": self._guard.new,
                "not saved": dict(self._guard.skipped)}

    def _stepped(self, optimizer):
        self._watch.stepped()
        self.readings.append(self._peaks.since_the_last())


def out_of_memory(error, step):
    """Return PyTorch's words, the step, and the innermost line of the user's that asked for too much."""
    from ..memory.tracking.lines import users

    line = None
    if found := users(reversed([*traceback.walk_tb(error.__traceback__)])):
        path, number = found[0].f_code.co_filename, found[1]
        line = f"{path.removeprefix(f'{Path.cwd()}/')}:{number}: {linecache.getline(path, number).strip()}"
    return {"message": str(error), "step": step, "line": line}


if __name__ == "__main__":
    main()
