"""Some steps under the tracker, once a cheap sign asks for it: which lines made what is there, and who holds it.

They are slower, and no others are: three steps, since what the second leaves and the third leaves again grows.
"""

import torch

from ..explain.recorder import ScriptRecorder
from ..explain.script_run import MOST

STEPS = 3


class TracedSteps:
    """Records some whole steps, from the end of step `begun` on, in its `recorder`, a ScriptRecorder."""

    def __init__(self, begun):
        self.begun, self.recorder, self._left = begun, ScriptRecorder(), STEPS

    def begin(self):
        """Begin, at the end of a step. Return why that is not possible, None if it is."""
        if torch._C._len_torch_dispatch_stack():
            return "a TorchDispatchMode is open, and would close in the tracker's place"
        self.recorder.begin_late()
        return None

    def stepped(self, optimizer):
        """Note the end of a step. Return whether it was the last one: the recorder is closed then."""
        self.recorder.stepped(optimizer)
        self._left -= 1
        if self._left > 0 and self.recorder.steps[-1] < MOST or not self.recorder.is_innermost:
            return False  # of a mode that the program has opened inside: that one has to close first
        self.recorder.end()
        self.close()
        return True

    def close(self):
        """Close the recorder."""
        self.recorder.__exit__(None, None, None)
