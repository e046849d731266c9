"""A training script on PyTorch's own allocator, for a GPU that is not there: `refimpl rehearse SCRIPT --on h100`.

    from refimpl.rehearse import rehearse
    rehearse("train.py", on="t4")["steps"]

Order of reading: `rehearsing` (one GPU, a process of its own for it), `command` (what is asked and printed), `child`
(that process: the device without kernels, then the script for some steps), `value_guard` (what a script may not ask of
a device that computes nothing), `file_guard` (what it may not write), `processes` (scripts that start one for each
GPU), `recorded_rehearsals` (for pages on machines that cannot).
"""

from .recorded_rehearsals import rehearse_or_read
from .rehearsing import CannotRehearse, rehearse

__all__ = ["CannotRehearse", "rehearse", "rehearse_or_read"]
