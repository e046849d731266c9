"""What the CPU's allocator gave while a script ran: workspaces of kernels, and tensors of other threads."""

from torch.autograd import profiler

from ..memory.allocator import CPUMeasurement


class AllocatorLog:
    """The log of a CPUMeasurement, `events`, from `begin()` to `end()`; None where there is none.

    There is one profiler a process. A script that has its own running keeps it, and for one that makes its own later
    this log ends at once.
    """

    def __init__(self):
        self.events, self._measurement, self._own = None, None, profiler.profile.__init__

    def begin(self):
        """Begin, unless the script profiles itself."""
        if profiler._is_profiler_enabled:
            return
        self._measurement = CPUMeasurement()
        self._measurement.__enter__()

        def of_the_script(made, *args, **kwargs):
            self._give_up()
            self._own(made, *args, **kwargs)

        profiler.profile.__init__ = of_the_script

    def end(self):
        """End, once or again."""
        if self._measurement is not None:
            measurement = self._measurement
            self._give_up()
            self.events = measurement.events

    def _give_up(self):
        measurement, self._measurement = self._measurement, None
        profiler.profile.__init__ = self._own
        if measurement is not None:
            measurement.__exit__(None, None, None)
