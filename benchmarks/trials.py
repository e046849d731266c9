"""Processes that may hang or end as they like, several at a time, under a limit for all."""

import subprocess
import tempfile
import time

from .record import CHECKOUT, cores

GRACE = 5  # seconds for a killed process to end: one that waits for a hung GPU may never end


def fault_of(status, said, done=None):
    """Return a trial's fault in one line; "" if there is none: it has printed `done`."""
    last = said[-1] if said else ""
    if isinstance(status, str):
        return status
    return "" if status == 0 and done in said else last[:200] or f"its trial ended with exit status {status}"


def in_order(commands, seconds, processes=None):
    """Run the processes {which: command} in this order, `processes` at a time (default: one per core).

    Yields (which, exit status, printed lines, seconds) as each ends. After `seconds` in all, running processes are
    killed and no other is started; a string that says so takes the place of their exit status.
    """
    processes = processes or cores()
    waiting, running, start = list(commands), {}, time.monotonic()
    try:
        while waiting or running:
            late = time.monotonic() - start > seconds
            while waiting and len(running) < processes and not late:
                which = waiting.pop(0)
                running[which] = Trial(commands[which])
            for which, trial in list(running.items()):
                status = trial.process.poll()
                if status is None and late:
                    status = f"not done after {seconds} seconds for all{trial.kill()}"
                if status is not None:
                    del running[which]
                    yield which, status, trial.said(), time.monotonic() - trial.begun
            if late:
                for which in waiting:
                    yield which, f"not tried: the {seconds} seconds for all were used up", [], 0.0
                return
            time.sleep(0.02)
    finally:
        for trial in running.values():
            trial.kill()
            trial.output.close()


class Trial:
    """A process and the file that it prints into. (A pipe that nobody reads would block the process when full.)"""

    def __init__(self, command):
        self.begun, self.output = time.monotonic(), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, cwd=CHECKOUT, stdout=self.output, stderr=subprocess.STDOUT)

    def kill(self):
        """Kill the process. Returns "", or an addition to the message if it does not end."""
        self.process.kill()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f", and {GRACE} seconds after it was killed it is still there"
        return ""

    def said(self):
        """Return the lines that it printed, and close the file."""
        self.output.seek(0)
        lines = self.output.read().strip().splitlines()
        self.output.close()
        return lines
