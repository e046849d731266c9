"""Lets an engine stand where an optimizer is expected: schedulers of the learning rate, loss scalers, trackers.

`torch.optim.lr_scheduler` takes nothing but instances of `torch.optim.Optimizer`, and reads `param_groups` and
`defaults`. An engine is one that wraps the optimizer it has made: it does not run Optimizer's `__init__`, and its
`param_groups`, `defaults` and `state` are the inner one's. What else it would inherit means something else for an
engine, so it is refused, and the error says what to call.
"""

import sys
from typing import Any

import torch

STEP = "register it on engine.optimizer, whose step runs once for each bucket above stage 0, or call it after step()"
STATE_DICT = "its state_dict is of all ranks, and runs no hooks: change what it returns, or what load_state_dict takes"


def _refused(name, instead):
    def method(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{name} of an engine: {instead}")
    method.__name__, method.__doc__ = name, f"Raise TypeError: {instead}."
    return method


class ActsAsOptimizer(torch.optim.Optimizer):
    """The part of an engine that is an optimizer; `step`, `zero_grad` and what saves and loads are its own."""

    @property
    def param_groups(self) -> Any:
        """Return the optimizer's param groups; above stage 0 with pieces of parameters."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        """Return the optimizer's default hyper-parameters."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        """Return the optimizer's state, of the parameters or pieces that this rank updates."""
        return self.optimizer.state

    def skip_step(self) -> None:
        """Drop the gradients of a step that a loss scaler skips."""
        self.zero_grad()

    @property
    def gradients_are_whole(self) -> bool:
        """Tell whether this rank has all gradients. If not, a loss scaler has to ask the other ranks."""
        return not self.stage or self.comm.world_size == 1

    @property
    def _step_supports_amp_scaling(self):
        """Return False. GradScaler.step reads this first: TypeError for one that looks at a rank's own shard alone, so
        that some ranks would step and others not. (ShardedGradScaler asks all, and has a `process_group`.)"""
        scaler = sys._getframe(1).f_locals.get("self")  # nothing hands the scaler over: it is found in its own frame
        if (not self.gradients_are_whole and isinstance(scaler, torch.amp.GradScaler)
                and not hasattr(scaler, "process_group")):
            raise TypeError(f"GradScaler looks for inf in one rank's shard of the gradients, and {type(self).__name__} "
                            "has them in shards: use refimpl.mixed_precision.AdaptiveLossScaler(comm=comm), which asks "
                            "all ranks, or stage 0 (DataParallel)")
        return False

    def __repr__(self):
        return (f"{type(self).__name__}({type(self.model).__name__}, rank {self.comm.rank} of {self.comm.world_size}, "
                f"{self.optimizer!r})")

    def __deepcopy__(self, memo):
        raise TypeError("an engine, or a model with the hooks of Zero3, cannot be copied: copy the model before an "
                        "engine is made of it, and fill the copy later: load_state_dict(engine.state_dict()['model'])")

    def __reduce_ex__(self, protocol):
        raise TypeError("an engine, or a model with the hooks of Zero3, cannot be pickled or copied: save it by "
                        "engine.save(directory) or torch.save(engine.state_dict(), path)")

    add_param_group = _refused("add_param_group", "all parameters have their places in buckets when it is made. Name "
                               "the groups in `groups`, or make a new engine of the model")
    register_step_pre_hook = _refused("register_step_pre_hook", STEP)
    register_step_post_hook = _refused("register_step_post_hook", STEP)
    register_state_dict_pre_hook = _refused("register_state_dict_pre_hook", STATE_DICT)
    register_state_dict_post_hook = _refused("register_state_dict_post_hook", STATE_DICT)
    register_load_state_dict_pre_hook = _refused("register_load_state_dict_pre_hook", STATE_DICT)
    register_load_state_dict_post_hook = _refused("register_load_state_dict_post_hook", STATE_DICT)
