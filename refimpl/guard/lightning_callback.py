"""A guard for the Trainer of Lightning: `Trainer(…, callbacks=[GuardCallback("oom/")])`."""

import importlib
import sys
from importlib.util import find_spec

from .around_training import AroundTraining

NAMES = "lightning.pytorch", "pytorch_lightning"


def _callback():
    """Return the class Callback of the Lightning that the program has loaded, else of one that is installed."""
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        if find_spec(name.partition(".")[0]):
            return importlib.import_module(name).Callback
    raise ModuleNotFoundError("neither lightning nor pytorch_lightning is installed: pip install lightning")


class GuardCallback(_callback()):
    """Keeps a Guard around `trainer.fit()`, and counts the steps as Lightning does: a run that is resumed goes on.

    - `folder`, `limit`: as of Guard
    """

    def __init__(self, folder, limit=None):
        self._around = AroundTraining(folder, limit)

    def on_fit_start(self, trainer, pl_module):
        """Begin."""
        self._around.begin()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Count as Lightning does."""
        self._around.guard.step = trainer.global_step

    def on_fit_end(self, trainer, pl_module):
        """End."""
        self._around.end()

    def on_exception(self, trainer, pl_module, exception):
        """End, and report it if memory was not enough."""
        self._around.end(exception)
