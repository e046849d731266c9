"""Where in its loop a program is, without a dispatch mode: forward, backward, optimizer, evaluation, save.

    model called ── forward … loss.backward() ── backward ── optimizer.step() ── optimizer ── the step has ended

A hook stands on each model, not on its modules; autograd's engine, `torch.save` and the like are wrapped.
"""

import functools
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.variable import Variable
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..explain.phases import BETWEEN, EVALUATION, OPTIMIZER, SAVE, START, Saving
from ..memory.storage_records import BACKWARD, FORWARD
from .known_bytes import KnownBytes, Rarely

GIVEN_UP = 3  # steps of another optimizer after which one that leads is taken to be gone


class Loop:
    """Tells a listener where a program is: a context around it.

    `listener.enters(phase)` is called where a phase begins, `batch(args, kwargs)` with what a model that trains is
    called on, `stepped(optimizer)` where a step has ended, `failed(error)` with an error that leaves a phase.
    """

    def __init__(self, listener):
        self.phase, self.known, self._listener = START, KnownBytes(), listener
        self._thread, self._installed = threading.get_ident(), ExitStack()
        self._hooks = weakref.WeakKeyDictionary()  # module -> its two handles
        self._called, self._went_back, self._lead, self._others = False, False, None, weakref.WeakKeyDictionary()
        self._inside = None  # the optimizer that leads, if it has stepped inside of a backward
        self._has_closure = False  # whether an optimizer's step is under way that calls forward and backward itself
        self._looking, self._kinds = Rarely(0.002), set()

    def __enter__(self):
        self._installed.callback(register_optimizer_step_pre_hook(self._steps).remove)
        self._post_hook = register_optimizer_step_post_hook(self._stepped)
        self._installed.callback(lambda: self._post_hook.remove())
        self._installed.enter_context(Saving(self._around))
        self._wrap_init()
        self.watch_engine()
        self.look()
        return self

    def __exit__(self, *exception):
        self._installed.close()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()

    def _be_last(self):
        """Be the last of the hooks behind a step: those behind it could not be called once it has opened or closed a
        tracker, which changes the dict that PyTorch goes through."""
        if next(reversed(_global_optimizer_post_hooks)) != self._post_hook.id:
            self._post_hook.remove()
            self._post_hook = register_optimizer_step_post_hook(self._stepped)

    def _wrap_init(self):
        original = Optimizer.__init__

        @functools.wraps(original)
        def made(optimizer, *args, **kwargs):
            original(optimizer, *args, **kwargs)
            self.known.optimizers.add(optimizer)
            self._wrap_step(type(optimizer))
            if not self.known.has(optimizer):  # there may be an optimizer for each parameter
                self.look()

        Optimizer.__init__ = made
        self._installed.callback(setattr, Optimizer, "__init__", original)

    def _wrap_step(self, kind):
        """Hear of the errors of a class's `step`, for which PyTorch has no hook."""
        original = kind.step
        if kind in self._kinds:
            return
        self._kinds.add(kind)

        @functools.wraps(original)
        def step(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._listener.failed(error)
                raise

        own = "step" in vars(kind)
        kind.step = step
        self._installed.callback((lambda: setattr(kind, "step", original)) if own else (lambda: delattr(kind, "step")))

    def watch_engine(self):
        """Put ourselves around autograd's engine as it is now; return a function that takes us away."""
        before = Variable._execution_engine
        Variable._execution_engine = _Engine(before, self._around)
        self._installed.callback(setattr, Variable, "_execution_engine", before)

    def look(self):
        """Look for models and optimizers, and put hooks on the models that are new."""
        with self._looking:
            self.known.find()
            for model in self.known.models:
                self._hook(model)
            for optimizer in self.known.optimizers:
                self._wrap_step(type(optimizer))

    def _hook(self, module):
        if module not in self._hooks and not isinstance(module, torch.jit.ScriptModule):
            self._hooks[module] = (
                module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                module.register_forward_hook(self._leave_model, always_call=True))

    def _go_down(self):
        """Put hooks on the children where no model itself was called: a part of it may be, as Lightning does."""
        for module in list(self._hooks):
            for child in module.children():
                if next(child.parameters(), None) is not None:
                    self._hook(child)

    # --- phases ------------------------------------------------------------------------------------------------------

    def _is_elsewhere(self):
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1

    def _enters(self, phase):
        self._listener.enters(phase)
        self.phase = phase

    @contextmanager
    def _around(self, phase):
        """Be in a phase, and then between two; where it was before if it loads; behind a save what follows is its: the
        state that it returned is copied."""
        if self._is_elsewhere() or self.phase == phase:
            yield
            return
        before = self.phase
        if phase == BACKWARD:
            self._went_back = True
            self._be_last()
        self._enters(phase)
        try:
            yield
        except BaseException as error:
            self._listener.failed(error)
            raise
        after = {BACKWARD: OPTIMIZER if self._has_closure else BETWEEN, SAVE: SAVE}
        self._enters(after.get(phase, before))
        if phase == BACKWARD and (self._inside is not None or not self.known.optimizers):
            self._end_step(self._inside)

    def _enter_model(self, module, args, kwargs):
        if is_compiling() or self._is_elsewhere():
            return
        self._called = True
        trains = torch.is_grad_enabled()
        if self.phase != (FORWARD if trains else EVALUATION):
            self._enters(FORWARD if trains else EVALUATION)
        if trains:
            self._listener.batch(args, kwargs)

    def _leave_model(self, module, args, output):
        if is_compiling() or output is not None:  # after an exception there is none
            return
        error = sys.exc_info()[1]
        if error is not None:
            self._listener.failed(error)

    def _steps(self, optimizer, args, kwargs):
        if self._is_elsewhere():
            return
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if not self._has_closure and self.phase != OPTIMIZER:
            self._enters(OPTIMIZER)

    def _stepped(self, optimizer, args, kwargs):
        lead = self._lead and self._lead()
        leads = lead is None or optimizer is lead or self._others.get(optimizer, 0) >= GIVEN_UP
        if leads:
            self._lead, self._others = weakref.ref(optimizer), weakref.WeakKeyDictionary()
        else:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
        if self._is_elsewhere():  # a parameter's own optimizer: the step ends with the backward
            self._inside = optimizer if leads else self._inside
            return
        self._has_closure = False
        if leads:
            self._end_step(optimizer)
        self._enters(BETWEEN)

    def _end_step(self, optimizer):
        self._inside = None
        self._listener.stepped(optimizer)
        if self._went_back and not self._called:
            self._go_down()
        self._called = self._went_back = False
        if self._looking.due():
            self.look()


class _Engine:
    """Autograd's engine, with a context around each backward."""

    def __init__(self, inner, around):
        self._inner, self._around = inner, around

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def run_backward(self, *args, **kwargs):
        """Run the engine's own."""
        with self._around(BACKWARD):
            return self._inner.run_backward(*args, **kwargs)
