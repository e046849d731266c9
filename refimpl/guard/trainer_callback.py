"""A guard for the Trainer of transformers: `Trainer(…, callbacks=[GuardCallback("oom/")])`."""

from transformers import TrainerCallback

from .around_training import AroundTraining


class GuardCallback(TrainerCallback):
    """Keeps a Guard around `trainer.train()`, and counts the steps as Trainer does: a run that is resumed goes on.

    - `folder`, `limit`: as of Guard

    With `auto_find_batch_size=True` one guard has all tries, and a report of each that failed.
    """

    def __init__(self, folder, limit=None):
        self._around = AroundTraining(folder, limit)

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin; a try with a smaller batch is the same training."""
        if not (self._around.guard and args.auto_find_batch_size):
            self._around.begin()

    def on_step_begin(self, args, state, control, **kwargs):
        """Count as Trainer does."""
        self._around.guard.step = state.global_step

    def on_train_end(self, args, state, control, **kwargs):
        """End."""
        self._around.end()
