"""One run of a script under the recorder, to the k-th optimizer step."""

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .recorder import ScriptRecorder, ScriptRecording
from .script import Ending
from .steps import Steps, StepsDone
from .switch import Switched

if TYPE_CHECKING:
    from .script import Script

MOST = 300_000  # operations of a recording: each takes about 13 kB until it is read
FROM_THE_START = 10  # of so many steps all are recorded; of more, where the N-th is asked for, the last few
STEPS = 3  # the first makes the optimizer's state; what the second leaves and the third leaves again grows


class TooLong(ValueError):
    """Says how many steps there is room for, where more were asked for."""


@dataclass
class Run:
    """What came of a run: the ScriptRecording so far, how the script ended, and how many steps of `limit` it made.

    `by_class`: steps by class of optimizer. `switched`: the Switched technique, if one was. `is_parent`: False in a
    process that the script forked and that came back here: it has nothing to say. `notes`: the script's own.
    `is_recorded`: False if it ended before the step after which it was to be recorded.
    """

    name: str
    recording: ScriptRecording
    ending: Ending
    limit: int
    steps: int
    by_class: dict
    done: bool
    caught: int
    switched: Switched | None
    is_parent: bool
    notes: Sequence[str] = ()
    is_recorded: bool = True

    @property
    def status(self) -> int:
        """Return the exit status: 0 once the steps are made, else the script's own."""
        return 0 if self.done else self.ending.status

    @property
    def words(self) -> str:
        """Return one sentence that says how far the script came."""
        made = ", ".join(f"{count} step{'s' * (count > 1)} of {name}" for name, count in self.by_class.items())
        made = made or "no optimizer step"
        if self.done:
            return f"{made}, then ended" + (", though the script caught the end and went on" if self.caught or
                                            self.ending.how != "steps" else "")
        how = {"end": "ended by itself", "exit": f"exited with status {self.ending.status}",
               "error": f"failed: {self.ending.words.rstrip('.')}", "interrupt": "was interrupted"}[self.ending.how]
        return f"{how}, after {made}" + (f" ({self.limit} were asked for)" if self.by_class else "")


def run(script: "Script", steps: int = STEPS, switch: Any = None, report: Any = None,
        until: str | None = None, after: int = 0) -> Run:
    """Run a Script or Function for `steps` optimizer steps and return the Run. What it writes to stderr is written.

    `until`: "evaluation", "generation" or "save": it goes on to the first step behind one. `switch`: a technique to
    switch on. `after`: how many steps of an optimizer it makes before it is recorded. `report(run)` is called in place
    of a return, and the process ends, if the script catches the end of the recording again and again. TooLong, after
    two steps, if there is no room for so many.
    """
    process = os.getpid()
    switched = Switched(switch) if switch else None

    def made(ending):
        notes = [*script.notes, *([f"recorded from the end of step {after} on: what was made before it is known where "
                                   "Python sees it, without its line"] if after and recorder.is_open else [])]
        return Run(script.name, recorder.recording(), ending, steps, counter.count, dict(counter.by_class),
                   counter.done, counter.caught, switched, os.getpid() == process, notes,
                   recorder.is_open)

    def caught():
        if report is not None:
            report(made(Ending("steps")))
        atexit._run_exitfuncs()  # os._exit runs none of them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the script catches what should end it, again and again

    def begin():
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError(f"a TorchDispatchMode is open at step {after}, where the recording begins, and would "
                               "close in its place: close it before, or ask for an earlier step")
        opened.push(recorder)
        recorder.begin_late()

    def stepped(optimizer):
        if recorder.is_open:
            recorder.stepped(optimizer)
        elif counter.count >= after:
            begin()
        if room() < steps - after:
            raise StepsDone

    def room():
        ends, count = recorder.steps, counter.count - after
        return MOST * (count - 1) // max(ends[-1] - ends[0], 1) if count > 1 else steps

    with switched or nullcontext(), ExitStack() as opened:
        recorder = ScriptRecorder(switched.on_model if switched else None)
        counter = Steps(steps, stepped, recorder.end, caught, lambda: until is None or recorder.has(until))
        recorder.by_hand.on_step = counter.stepped
        if not after:
            opened.enter_context(recorder)
        with counter:
            ending = script.run()
            try:
                if ending.how in ("end", "exit"):
                    recorder.by_hand.script_ended()
            except StepsDone:
                ending = Ending("steps")
    if ending.how == "steps" and not counter.done:
        raise TooLong(f"{steps} steps: a recording has room for {MOST:,} operations, here {room():,} steps; ask "
                      "for the last few of them by `--until step N`, or have the script do earlier what you look for")
    if ending.text and not counter.done:
        if isinstance(ending.error, BrokenPipeError):
            print(flush=True)  # raises it again where it is ours: nobody reads what is printed
        sys.stdout.flush()
        sys.stderr.write(ending.text)
    return made(ending)
