"""AdaptiveLossScaler: multiplies the loss so that gradients fit into fp16, and skips the steps that overflow.

fp16 ends at 65504 above and at 2⁻²⁴ ≈ 6·10⁻⁸ below, and many gradients are smaller than that. By the chain rule a loss
times S gives gradients times S; they are divided by S again in fp32. The largest S that does not overflow is best, and
it changes as training goes on. "Mixed Precision Training" (Micikevicius et al. 2018), section 3.2.
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import Communicator
from ..common.keyword_options import check_options
from .internals.support import LOW_DTYPES

NO_GRADIENTS, FINITE, OVERFLOW = 0.0, 1.0, 2.0  # what a rank found; the maximum over ranks decides
SETTINGS = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale")


class AdaptiveLossScaler:
    """Scale the loss, skip steps that overflow, and adapt the scale. Use it as `torch.amp.GradScaler`:

        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

    - After an overflow (an inf or NaN in a gradient) the step is skipped and the scale times `backoff_factor`, not
      below `min_scale`; after `growth_interval` steps without one it is times `growth_factor`, not above `max_scale`.
    - `hysteresis`: how many overflows it takes to back off. Those before the last only skip their step; the count
      begins anew when the scale grows (DeepSpeed's DynamicLossScaler with `consecutive_hysteresis=False`).
    - `comm`: a Communicator; then an overflow on one rank is one on all, and all call `step` together. ValueError for
      an engine with gradients in shards if there is none.

    A step waits for the device once, however many gradients there are. Raises ValueError for invalid settings, and
    TypeError for an unknown one and for a `comm` that is not a Communicator.
    """

    def __init__(self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, hysteresis: int = 1, min_scale: float = 1.0, max_scale: float = 2.0**24,
                 *, comm: Communicator | None = None, **unknown: Any) -> None:
        check_options(unknown, ("init_scale", *SETTINGS, "comm"), type(self).__name__)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.hysteresis, self.min_scale, self.max_scale, self.comm = hysteresis, min_scale, max_scale, comm
        self._check()
        if comm is not None and not isinstance(comm, Communicator):
            raise TypeError(f"comm={comm!r}: expected a Communicator, such as comm.launch gives each rank, or None for "
                            "one process alone")
        self._scale = self._checked_scale(init_scale, "init_scale")
        self._good_steps, self._tolerated = 0, hysteresis
        self.skipped_steps = 0  # since the beginning
        self._found = {}  # optimizer -> what was found, from unscale_ or step until update
        self._stepped = set()
        self._in_use = False  # whether the scale was ever read

    def _check(self):
        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected a number")
        if not (1 < self.growth_factor < math.inf):
            raise ValueError(f"growth_factor={self.growth_factor}: expected more than 1, or the scale would never grow")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor}: expected between 0 and 1, or the scale would not "
                             "shrink after an overflow")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a number of steps, an integer of at least 1")
        if not 0 < _fp32(self.min_scale) <= _fp32(self.max_scale) < math.inf:
            raise ValueError(f"min_scale={self.min_scale}, max_scale={self.max_scale}: expected 0 < min_scale <= "
                             "max_scale, both finite, also in fp32, in which the loss is multiplied")

    def _checked_scale(self, scale, name):
        if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"{name}={scale!r}: expected a finite number above 0, such as 2.0**16")
        if not self.min_scale <= scale <= self.max_scale:
            raise ValueError(f"{name}={scale}: expected from min_scale={self.min_scale} to max_scale={self.max_scale}; "
                             "widen the two or choose another scale")
        return _fp32(scale)

    # --- before backward ---------------------------------------------------------------------------------------------

    def get_scale(self) -> float:
        """Return S, a float."""
        self._in_use = True  # gradients of a loss that was not scaled must not be divided
        return self._scale

    def scale(self, loss: Any) -> Any:
        """Return `loss` · S, in fp32 or wider; of a list or tuple of losses, each one. TypeError for anything else."""
        if isinstance(loss, tuple) and hasattr(loss, "_fields"):
            return type(loss)(*map(self.scale, loss))
        if isinstance(loss, (list, tuple)):
            return type(loss)(self.scale(each) for each in loss)
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            raise TypeError(f"scale({type(loss).__name__}): expected a floating-point tensor, the loss, or a list of "
                            "them")
        return (loss.float() if loss.dtype in LOW_DTYPES else loss) * self.get_scale()

    # --- after backward ----------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S in place, so that they can be clipped. Once a step; if not called, `step` does it.

        Gradients of a MixedPrecisionOptimizer become fp32 here (2 bytes a parameter more, until its step), since fp16
        could not hold them; an engine of ZeRO divides them in its norm and its step. ValueError for fp16 gradients of
        any other optimizer, and if there are no gradients.
        """
        if optimizer in self._found:
            raise RuntimeError("unscale_ was called twice for this optimizer: the gradients would be divided twice; "
                               "call it once between backward() and update()")
        widen = getattr(optimizer, "widen_gradients", None)
        if widen is not None:
            widen()
        elif self._divides_later(optimizer):
            return
        for gradients in self._gradients(optimizer):
            _refuse_fp16(gradients)
        flags = []
        for gradients in self._gradients(optimizer):
            for parts in _by_device_and_dtype(gradients).values():
                torch._foreach_mul_(parts, 1 / self._scale)
            flags += _finite(gradients)
        self._found[optimizer] = self._look(flags)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Call `optimizer.step()`, unless a gradient is inf or NaN on any rank. Returns what it returns, or None.

        ValueError for a `closure`, for fp16 gradients (as in `unscale_`) and if there are no gradients; RuntimeError
        for a second call before `update()`, and if no loss was scaled.
        """
        if closure is not None:
            raise ValueError("step(optimizer, closure): a closure computes gradients of its own, of a loss that was "
                             "not scaled; call scaler.scale(loss).backward() before, and then step(optimizer)")
        if optimizer in self._stepped:
            raise RuntimeError("step was called twice for this optimizer: call update() after each step")
        if optimizer not in self._found and not self._divides_later(optimizer):
            self.unscale_(optimizer)
        found = self._ask(self._found[optimizer])
        self._found[optimizer] = found
        self._stepped.add(optimizer)
        if found == NO_GRADIENTS:
            raise ValueError("no rank has a gradient: call scaler.scale(loss).backward() before step()")
        if found == FINITE:
            return optimizer.step()
        self.skipped_steps += 1
        skip = getattr(optimizer, "skip_step", None)
        return skip() if skip is not None else None

    def update(self, new_scale: float | None = None) -> None:
        """Grow, back off or keep S, by what the steps since the last update found. `new_scale` sets it instead.

        Raises FloatingPointError if gradients overflow although S is `min_scale`: the run has diverged. RuntimeError
        before any step, ValueError for a `new_scale` that cannot be.
        """
        found, self._found, self._stepped = list(self._found.values()), {}, set()
        if new_scale is not None:
            self._scale = self._checked_scale(new_scale, "new_scale")
            return
        if not found:
            raise RuntimeError("update() before any step: call step(optimizer), or unscale_(optimizer), first")
        if any(self._ask(each) == OVERFLOW for each in found):
            self._overflowed()
        else:
            self._went_well()

    def _overflowed(self):
        self._good_steps = 0
        if self._tolerated > 1:
            self._tolerated -= 1
            return
        if self._scale <= self.min_scale:
            raise FloatingPointError(f"gradients overflow with the loss scale at min_scale={self.min_scale}: training "
                                     "has diverged (look for inf or NaN in the loss, lower the learning rate, clip), "
                                     "or min_scale is too high")
        self._scale = max(_fp32(self._scale * self.backoff_factor), self.min_scale)

    def _went_well(self):
        self._good_steps += 1
        if self._good_steps >= self.growth_interval:  # >=: a loaded state may have lowered it
            self._scale = min(_fp32(self._scale * self.growth_factor), self.max_scale)
            self._good_steps, self._tolerated = 0, self.hysteresis

    # --- what the gradients are --------------------------------------------------------------------------------------

    def _gradients(self, optimizer):
        """Yield lists of gradients: all at once, or as `optimizer.gradients()` yields them, which may load each."""
        if self.comm is None and not getattr(optimizer, "gradients_are_whole", True):
            raise ValueError(f"{type(optimizer).__name__} has gradients in shards, and a rank would look at its own: "
                             "AdaptiveLossScaler(comm=comm) asks all ranks")
        batches, some = optimizer.gradients() if hasattr(optimizer, "gradients") else [
            [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]], False
        for gradients in batches:
            if gradients and not self._in_use:
                raise RuntimeError(f"no loss was scaled, and the gradients would be divided by {self._scale:g}: call "
                                   "scaler.scale(loss).backward()")
            some = some or bool(gradients)
            yield gradients
        if not some and self.comm is None:
            raise ValueError("the optimizer's parameters have no gradients: call scaler.scale(loss).backward() before "
                             "step(), and check that the model has parameters that require them")

    def _divides_later(self, optimizer):
        """Let an optimizer that can divide in fp32, when it gives gradients to its masters. Return whether it does."""
        multiply = getattr(optimizer, "multiply_gradients", None)
        if multiply is not None:
            self._found[optimizer] = self._look([flag for gradients in self._gradients(optimizer)
                                                 for flag in _finite(gradients)])
            multiply(1 / self._scale)
        return multiply is not None

    def _look(self, flags):
        """Return NO_GRADIENTS, FINITE or OVERFLOW over all ranks, as a tensor on the device, without waiting for it."""
        device = flags[0].device if flags else self.comm.device
        found = torch.full((), FINITE if flags else NO_GRADIENTS, device=device)
        for flag in flags:
            found = torch.where(flag.to(device, non_blocking=True), found, OVERFLOW)
        return found if self.comm is None else self.comm.all_reduce(found, "max")

    @staticmethod
    def _ask(found):
        """Return the number, waiting for the device. A dry run has no numbers: FINITE."""
        if isinstance(found, torch.Tensor):
            return FINITE if isinstance(found, FakeTensor) else found.item()
        return found

    # --- save and resume ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return S, the steps since it last grew, and the settings."""
        return {"scale": self._scale, "good_steps": self._good_steps, "tolerated": self._tolerated,
                "skipped_steps": self.skipped_steps, **{name: getattr(self, name) for name in SETTINGS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken, with its settings. ValueError if something is missing or wrong."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))} in this state: expected what AdaptiveLossScaler's "
                             "state_dict() gives")
        before = self.state_dict()  # a wrong state leaves the old one in force
        try:
            self._take(state)
            self._check()
            self._checked_scale(self._scale, "scale")
            self._check_counts()
        except ValueError:
            self._take(before)
            raise

    def _check_counts(self):
        for name, value, least in (("good_steps", self._good_steps, 0), ("tolerated", self._tolerated, 1),
                                   ("skipped_steps", self.skipped_steps, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")

    def _take(self, state):
        for name in SETTINGS:
            setattr(self, name, state[name])
        self._scale, self._good_steps, self._tolerated = state["scale"], state["good_steps"], state["tolerated"]
        self.skipped_steps = state["skipped_steps"]

    def __repr__(self):
        return f"AdaptiveLossScaler(scale {self._scale:g}, {self.skipped_steps} steps skipped)"


def _fp32(x):
    """Return `x` rounded to fp32, in which the loss is multiplied; inf beyond its range."""
    return ctypes.c_float(x).value


def _refuse_fp16(gradients):
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError("gradients in float16 cannot be divided by the scale: what is below 6e-8 would become 0. Keep "
                         "the weights in fp32 (under autocast), or wrap the optimizer: MixedPrecisionOptimizer("
                         "optimizer, torch.float16)")


def _finite(gradients):
    """Return whether they are finite, a flag (a tensor) for each device and dtype."""
    return [torch.stack(_extremes(parts)).isfinite().all() for parts in _by_device_and_dtype(gradients).values()]


def _extremes(tensors):
    """Return numbers of which one is inf or NaN exactly if an element of a tensor is.

    These are each tensor's largest magnitude on CUDA, where a few kernels read all tensors, and its minimum and maximum
    on a CPU, where that kernel is the faster one.
    """
    if tensors[0].is_cpu:
        return [end for tensor in tensors for end in tensor.aminmax()]
    return torch._foreach_norm(tensors, math.inf)


def _by_device_and_dtype(gradients):
    """Group gradients as {(device, dtype): dense, real tensors}.

    Of a sparse gradient these are the stored values, of a complex one its real and imaginary parts.
    """
    groups = defaultdict(list)
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        if values.numel():
            groups[values.device, values.dtype].append(values.detach())
    return groups
