"""MixedPrecisionOptimizer: weights and gradients in 16 bits; in fp32, the master weights that small updates need.

A weight near 1 in bf16 has neighbours 2⁻⁷ apart, and an update of 10⁻⁴ would round away, step after step. So the
optimizer works on an fp32 copy of each weight, the master, and the model gets it rounded. "Mixed Precision Training"
(Micikevicius et al. 2018), section 3.1. With Ψ parameters and Adam, in bytes:

    2Ψ weights + 2Ψ gradients + 4Ψ masters + 8Ψ moments = 16Ψ       (as much as fp32 without masters: 4 + 4 + 8)
    2Ψ weights + 4Ψ gradients + 4Ψ masters + 8Ψ moments = 18Ψ       fp32 gradients

"ZeRO" (Rajbhandari et al. 2020), section 3.1, counts the 16; `memory.model_state_bytes` has both.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from . import masters
from .internals import group_options
from .internals.support import check_dtype


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Wrap an optimizer: `MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))`.

    The parameters that it holds become `dtype`, in place: the model, tied weights and hooks keep the same objects. What
    the optimizer does not hold (frozen parameters, buffers) stays: `model.to(dtype)` afterwards, if you want that low.
    A frozen parameter that it does hold gets a master when it first has a gradient.

    - `fp32_gradients`: autograd adds up gradients in fp32 (2 bytes a parameter more; for many micro-batches).
    - `max_grad_norm`: clip the norm of all gradients, as `clip_grad_norm_` does, on the way to fp32. `.grad_norm` is
      then the norm before clipping, a tensor without dimensions.
    - `bucket_bytes`: a step widens 16-bit gradients this many bytes (of fp32) at a time, steps these parameters and
      frees the fp32 gradients (`step_bytes`); None: all at once. The inner optimizer's `step` and its hooks run once
      for each bucket; hooks registered on this optimizer run once a step.

    Schedulers, `zero_grad`, `add_param_group`, closures and `state_dict` work as with any optimizer; the state of a
    parameter is the inner optimizer's and `"master"`. If you write to a weight between steps, the next step takes over
    what you wrote: the elements of the master that do not round to the weight are set to it. A write through `.data` is
    not noticed: call `sync_masters()` after it. Raises TypeError for anything but an optimizer, ValueError for a dtype,
    parameter or setting that it cannot work with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.bfloat16, *,
                 fp32_gradients: bool = False, max_grad_norm: float | None = None, bucket_bytes: int = 2**25) -> None:
        if (not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, MixedPrecisionOptimizer)
                or hasattr(optimizer, "backward")):  # an engine holds pieces, and masters of its own
            raise TypeError(f"MixedPrecisionOptimizer({type(optimizer).__name__}): expected an optimizer of the "
                            "model's parameters, such as torch.optim.AdamW(model.parameters())")
        if getattr(optimizer, "_has_masters", False):
            raise ValueError(f"this {type(optimizer).__name__} is wrapped already: use the MixedPrecisionOptimizer "
                             "that holds it, or build a new optimizer of model.parameters()")
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise ValueError(f"max_grad_norm={max_grad_norm}: expected a finite number above 0, or None not to clip")
        masters.check_bucket_bytes(bucket_bytes)
        self.dtype, self.fp32_gradients = check_dtype(dtype), bool(fp32_gradients)
        self.max_grad_norm, self.bucket_bytes, self.grad_norm = max_grad_norm, bucket_bytes, None
        self.inner = optimizer
        self._masters, self._written = {}, {}  # parameter -> master; -> (version, storage) after our last write
        self._factor, self._widened = 1.0, False
        masters.check([p for group in optimizer.param_groups for p in group["params"]])
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        optimizer._has_masters = True  # two wrappers would round twice

    # --- parameters --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, here and in the inner optimizer. Its parameters become 16-bit."""
        place, new = len(self.param_groups), len(self.param_groups) == len(self.inner.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[place]
        try:
            masters.check([p for each in self.param_groups for p in each["params"]])
        except ValueError:
            self.param_groups.pop()
            raise
        stand_ins = [self._adopt(p) for p in group["params"]]
        if new:
            self.inner.add_param_group({**group, "params": stand_ins})
        else:
            self.inner.param_groups[place]["params"][:] = stand_ins  # in place: LBFGS holds this list
        self._inner_options = group_options.remember(self.inner.param_groups)
        self._show(group["params"])

    def _adopt(self, parameter):
        """Cast the parameter to 16 bits. Returns what the inner optimizer gets: its master; itself if frozen."""
        master = masters.master_of(parameter) if parameter.requires_grad else None
        masters.narrow(parameter, self.dtype, self.fp32_gradients)
        self._note(parameter)
        if master is None:
            return parameter
        self._masters[parameter] = master
        if parameter in self.inner.state:
            self.inner.state[master] = self.inner.state.pop(parameter)
        return master

    def _note(self, parameter):
        self._written[parameter] = parameter._version, parameter.untyped_storage()._cdata

    def _show(self, parameters):
        """Set `self.state` of these parameters: the master and the inner optimizer's state."""
        for p in parameters:
            if p in self._masters:
                self.state[p] = {"master": self._masters[p], **self.inner.state.get(self._masters[p], {})}

    def sync_masters(self) -> None:
        """Set the elements of each master that do not round to its weight to the weight. Call it after writing to
        `p.data`."""
        for p, master in self._masters.items():
            masters.sync(master, p)
            self._note(p)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def multiply_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor` in the next step, in fp32. (So a loss scaler divides by its scale.)"""
        self._factor *= factor  # applied in fp32, when gradients go to the masters

    def widen_gradients(self) -> None:
        """Make every gradient fp32 until the next step or `zero_grad`, so that it can be unscaled and clipped."""
        if not self.fp32_gradients:
            self._widened = True
            self._set_gradients(torch.float32)

    def _set_gradients(self, dtype):
        for p in self._parameters():
            gradient, p.grad = p.grad, None
            p.grad_dtype = dtype
            p.grad = None if gradient is None else gradient.to(dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as any optimizer does, and what was prepared for a step."""
        super().zero_grad(set_to_none)
        self.skip_step()

    def skip_step(self) -> None:
        """Drop what was prepared for a step: gradients get their own dtype again, and the factor is 1."""
        self._factor = 1.0
        if self._widened:
            self._widened = False
            self._set_gradients(self.dtype)

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of the inner optimizer on the masters, which are then rounded into the weights.

        With a closure, which may be called several times, all gradients are fp32 at once. ValueError if no parameter
        has a gradient, or if one has another dtype or device than we gave it.
        """
        group_options.check_unchanged(self._inner_options, self.inner.param_groups)
        self._give_options()
        try:
            if closure is not None:
                loss = self.inner.step(lambda: self._evaluate(closure))
                self._publish(self._masters)
            else:
                loss, ready = None, self._ready()
                factor = self._clip(ready)
                for bucket in masters.buckets(ready, self.bucket_bytes, lambda p: 4 * p.numel()):
                    self._step_on(bucket, factor)
        finally:
            for master in self._masters.values():
                master.grad = None  # also after an error: fp32 gradients are lent for a step
        self._take_options()
        self._show(self._masters)
        self.skip_step()  # the factor and wide gradients are used up
        return loss

    def _ready(self):
        """Return the parameters with a gradient, after their masters were brought up to date."""
        ready = [p for p in self._parameters() if p.grad is not None]
        if not ready:
            raise ValueError("no parameter of this optimizer has a gradient: call loss.backward() before step(), and "
                             "check that the model has parameters that require them")
        for p in ready:
            if p not in self._masters:  # it was frozen before
                self._unfreeze(p)
            masters.check_place(p, self._masters[p], self.dtype)
            if self._written[p] != (p._version, p.untyped_storage()._cdata):
                masters.sync(self._masters[p], p)
                self._note(p)
        return ready

    def _unfreeze(self, parameter):
        self._masters[parameter] = master = masters.master_of(parameter)
        for group in self.inner.param_groups:
            group["params"][:] = [master if p is parameter else p for p in group["params"]]

    def _clip(self, ready):
        """Return what gradients are multiplied by: the postponed factor, smaller if their norm is too large."""
        if self.max_grad_norm is None:
            return self._factor
        self.grad_norm = masters.norm([p.grad for p in ready]) * self._factor
        return (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) * self._factor

    def _step_on(self, bucket, factor):
        """Step the inner optimizer on these parameters only.

        Every bucket starts from the same options. So an optimizer that counts steps in its param groups counts one per
        step, not one per bucket.
        """
        self._give_options()
        masters.give_gradients(bucket, self._masters, factor)
        # by id: tensors compare element by element
        wanted, groups = {id(self._masters[p]) for p in bucket}, self.inner.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self.inner.param_groups = [group for group in groups if group["params"]]
            self.inner.step()
        finally:
            self.inner.param_groups = groups
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
        self._publish(bucket)
        for p in bucket:
            self._masters[p].grad = None

    def _evaluate(self, closure):
        """Return the closure's loss on weights rounded from the current masters; give the masters its gradients."""
        for p, master in self._masters.items():
            if self._written[p] != (p._version, p.untyped_storage()._cdata):
                masters.sync(master, p)
        self._publish(self._masters)
        with torch.enable_grad():
            loss = closure()
        ready = self._ready()
        masters.give_gradients(ready, self._masters, self._clip(ready))
        return loss

    def _publish(self, parameters):
        """Round the masters into the weights."""
        masters.round_into([self._masters[p] for p in parameters], list(parameters))
        for p in parameters:
            self._note(p)

    def _give_options(self):
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            group_options.replace(theirs, ours)

    def _take_options(self):
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            group_options.replace(ours, theirs)
        self._inner_options = group_options.remember(self.inner.param_groups)

    # --- save, resume, copy ------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters, state and options as `state_dict()` gave them; the weights become the rounded masters.

        ValueError for a state without masters, such as a plain optimizer's, or with other groups.
        """
        state = state_dict["state"]
        without = [index for index, each in state.items() if "master" not in each]
        if without:
            raise ValueError(f"no master weight in the state of parameters {without}: expected what "
                             "MixedPrecisionOptimizer's state_dict() gives; load a plain optimizer's state into it "
                             "before it is wrapped")
        parameters = dict(enumerate(self._parameters()))
        for index in state:
            if index in parameters and parameters[index] not in self._masters:
                self._unfreeze(parameters[index])
        inner = {index: {name: value for name, value in each.items() if name != "master"}
                 for index, each in state.items()}
        self.inner.load_state_dict({"state": {index: each for index, each in inner.items() if each},
                                    "param_groups": state_dict["param_groups"]})
        self._take_options()
        loaded = [parameters[index] for index in state]
        masters.round_into([each["master"] for each in state.values()], [self._masters[p] for p in loaded])
        self._publish(loaded)
        self.state.clear()
        self._show(self._masters)

    def __getstate__(self):
        ours = ("dtype", "fp32_gradients", "max_grad_norm", "bucket_bytes", "grad_norm", "inner", "_masters", "_factor",
                "_widened", "_inner_options")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ours},
                "_stale": [p for p, seen in self._written.items()
                           if seen != (p._version, p.untyped_storage()._cdata)]}

    def __setstate__(self, state):
        stale = state.pop("_stale", ())
        super().__setstate__(state)
        self._written = {}
        for p in self._parameters():
            if p.grad is None:
                p.grad_dtype = torch.float32 if self.fp32_gradients or self._widened else self.dtype
            self._note(p)
        for p in stale:
            self._written[p] = None
