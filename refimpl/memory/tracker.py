"""The tracker: exact bytes of every tensor storage, by category, on any device and on fake tensors.

`tracking/storages.py` counts the storages. The Tracker finds out what each is for, from what modules, optimizers and
autograd report.

It does not see what a kernel takes and returns inside one operation (`memory.measure` does), operations on threads that
the program starts (those of autograd are seen), a bare `UntypedStorage` until a tensor is on it, and tensors in
oneDNN's own layout. What C++ allocates without the dispatcher, such as the buckets of DistributedDataParallel, counts
as older than the trace from when it is first used. Compiled code runs as such: its buffers and the operations that it
calls are seen, its modules are not.

It takes care not to be in the way: a tracked program takes what the same program takes untracked
(`tracking/in_place.py`). What kernels are known to take besides is said in `notes`, which are printed with the bytes.
"""

from bisect import bisect_right
from typing import Self

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ..common.ledger import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from ..common.marks import mark_of
from ..common.nested_tensors import tensors_in
from .storage_records import BACKWARD, FORWARD, STEP
from .trace import Trace
from .tracking import listeners
from .tracking.in_place import calibrate
from .tracking.owners import Owners
from .tracking.storages import StorageMode


def track(*objects: object) -> "Tracker":
    """Count the bytes of everything that happens in the context, by category.

    `with memory.track(model, optimizer) as t: step()`, then `t.peak`, `t.now`, `t.start` (Ledgers, bytes),
    `t.timeline`, `t.top(…)`, `t.plot()`. Modules and optimizers that run inside are found; `objects` (modules,
    optimizers, input tensors, or lists and dicts of these) names what existed before and might not be touched.
    TypeError for anything else.
    """
    return Tracker(*objects)


class Tracker(StorageMode):
    """Counts bytes by category while its context is open; a Trace then. `track(…)` makes it, and says what it takes.

    It is used once: RuntimeError if it is entered again.
    """

    def __init__(self, *objects: object) -> None:
        super().__init__()
        self._objects = objects
        self._modules = []  # the modules whose forward is running, outermost first
        self._met = WeakIdKeyDictionary()  # the modules and optimizers, while they live: an id is used again
        self._names = WeakIdKeyDictionary()  # module -> path
        self._owners = Owners()
        self._numbers, self._switches = [0], [""]  # autograd's sequence numbers; the module that runs from each on
        self._hooks = []
        self._stepping = 0
        self._waiting = []  # steps whose closure runs
        self._backwards = set()  # ids of the backwards seen
        self.nodes_run = set()  # autograd's sequence numbers of the nodes in which backward ran an operation

    # --- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.ops or self._alive:
            raise RuntimeError("this tracker has recorded already: call memory.track(…) again for a new one")
        self._under_fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        calibrate(self._under_fake_mode)
        objects, self._objects = self._objects, ()  # what the program frees inside must go
        try:
            for thing in objects:
                self._adopt(thing)
            listeners.subscribe(self)
        except BaseException:
            self._unhook()
            raise
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._adopt_again()
        listeners.unsubscribe(self)
        self._unhook()
        self._alive.clear()  # the weak references with it: `now` stays as it is

    def _unhook(self):
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __dir__(self):
        """List what users call: what a Trace has, and not what the listeners tell."""
        return [*dir(Trace()), *(["result"] if "result" in vars(self) else [])]

    # --- where and when --------------------------------------------------------------------------------------------

    def _where(self):
        task = torch._C._current_graph_task_id()
        if task == -1:
            return STEP if self._stepping else FORWARD, self._switches[-1]
        if task not in self._backwards:
            self._backward_began(task)
        return BACKWARD, self._switches[-1] or self._module_of_node()

    def _module_of_node(self):
        """Return, in backward, the path of the module whose forward made the autograd node that runs."""
        node = torch._C._current_autograd_node()
        number = 2**63 if node is None else node._sequence_nr()
        if number >= 2**63:  # the node that accumulates a gradient has no place in the order
            return ""
        self.nodes_run.add(number)
        return self._switches[bisect_right(self._numbers, number) - 1]

    def phase(self) -> str:
        """Return the phase that an operation would be of that ran now."""
        return self._where()[0]

    def path_of(self, module: torch.nn.Module) -> str:
        """Return the path by which records name a module; one that has not run is called by its class."""
        return self._names[module] if module in self._names else type(module).__name__

    def _backward_began(self, task):
        """Note what was made before it and is still alive: it is kept for this backward."""
        self._backwards.add(task)
        for index, _ in list(self._alive.values()):
            record = self.records[index]
            record.kept = record.kept or record.phase != BACKWARD

    # --- what the listeners tell -----------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        """Note that a module's forward begins. The outermost one is adopted."""
        if not self._modules:
            self._stepping = 0  # a step that raised did not report its end
            self._adopt(module)
            if self.first_call is None:
                self.first_call = len(self.ops)
        self._names.setdefault(module, type(module).__name__)
        self._modules.append(module)
        self._program.enter_module()
        self._switch()

    def leave_module(self, module: torch.nn.Module, arguments: object) -> None:
        """Note that a module's forward ended, or raised. What the outermost one got from outside are inputs."""
        if module in self._modules:
            while self._modules.pop() is not module:
                pass
            self._program.leave_module(len(self._modules))
            self._switch()
        recomputes = self._packing or torch._C._current_graph_task_id() != -1  # a technique: what it feeds is no input
        if not self._modules and not recomputes:
            for tensor in filter(lambda tensor: tensor.is_leaf, tensors_in(arguments)):
                self._watch_gradient(tensor)
                for record in self._of(tensor):
                    if not record.module:
                        record.roles.add(INPUTS)

    def _switch(self):
        module = self._names[self._modules[-1]] if self._modules else ""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._switches.append(module)

    def own_parameter(self, parameter: torch.Tensor, name: str = "") -> None:
        """Note a parameter that a module registered, or that was found in one."""
        if parameter is not None and not is_lazy(parameter):
            self._role(parameter, PARAMETERS, parameter)
            self._watch_gradient(parameter)

    def own_buffer(self, buffer: torch.Tensor) -> None:
        """Note a buffer that a module registered, or that was found in one."""
        if buffer is not None:
            self._role(buffer, BUFFERS, buffer)

    def enter_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's step begins: gradients assigned by hand are found now at the latest."""
        self._adopt_optimizer(optimizer)
        self._stepping += 1

    def enter_closure(self) -> None:
        """Note that a step calls the function that computes the loss."""
        self._waiting.append(self._stepping)
        self._stepping = 0

    def leave_closure(self) -> None:
        """Note that this function returned, and the step goes on."""
        self._stepping = self._waiting.pop()

    def leave_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's step ended: state that it created lazily is known now."""
        self._stepping = max(0, self._stepping - 1)
        for parameter, state in self._states(optimizer):
            self._adopt_state(parameter, state)

    def saved(self, tensor: torch.Tensor) -> None:
        """Note that autograd saved the tensor itself."""
        for record in self._of(tensor):
            record.saved = True

    def offered(self, tensor: torch.Tensor) -> None:
        """Note that autograd offered the tensor to a technique's pack hook."""
        for record in self._of(tensor):
            record.offered = True

    def packed(self, packed: object) -> None:
        """Note what the technique's pack hook returned."""
        for tensor in tensors_in(packed):
            for record in self._of(tensor):
                record.packed = True

    def enter_packing(self) -> None:
        """Note that storages made from here on are a technique's own."""
        self._packing += 1

    def leave_packing(self) -> None:
        """Note that they are not any more."""
        self._packing -= 1

    def function_returned(self, outputs: object) -> None:
        """Note the outputs of an autograd.Function: they are the caller's, not what the function kept."""
        for tensor in tensors_in(outputs):
            for record in self._of(tensor):
                record.packed = False

    def marked(self, tensor: torch.Tensor) -> None:
        """Note that this tensor's storage was marked."""
        for record in self._of(tensor):
            record.mark = mark_of(tensor.untyped_storage())

    # --- what existed before ---------------------------------------------------------------------------------------

    def _adopt(self, thing):
        """Give everything that belongs to `thing` its category; again and again, since it may have changed."""
        if isinstance(thing, torch.nn.Module):
            if thing not in self._met:
                self._met[thing] = None
                for path, module in thing.named_modules():
                    self._names.setdefault(module, path or type(module).__name__)
            self._owners.learn(thing, self._names)
            for parameter in thing.parameters():  # again each time: a technique may have replaced some
                self.own_parameter(parameter)
            for buffer in thing.buffers():
                self.own_buffer(buffer)
        elif isinstance(thing, torch.optim.Optimizer):
            self._adopt_optimizer(thing)
            for parameter, state in thing.state.items():
                self._adopt_state(parameter, state)
        elif isinstance(thing, torch.Tensor):
            self._role(thing, INPUTS)
        elif isinstance(thing, (list, tuple, dict)):
            for item in thing.values() if isinstance(thing, dict) else thing:
                self._adopt(item)
        else:
            raise TypeError(f"track({type(thing).__name__}): expected models, optimizers, tensors, or lists and dicts "
                            "of these (not a model's parameters: the model)")

    def _adopt_optimizer(self, optimizer):
        """Give the parameters that an optimizer updates, and its states, their categories."""
        self._met[optimizer] = None
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            self._watch_gradient(parameter)
            for record in self._of(parameter):
                record.held_by_optimizer = True
        for parameter, state in self._states(optimizer):
            self._adopt_state(parameter, state)

    def _states(self, optimizer):
        """List (parameter, state) of the parameters in its groups. An optimizer that takes some parameters at a time
        has only those there: looking at all states in each of its steps would take too long."""
        state = optimizer.state
        return [(parameter, state[parameter]) for group in optimizer.param_groups for parameter in group["params"]
                if parameter in state]

    def _adopt_state(self, parameter, state):
        for name, value in state.items() if isinstance(state, dict) else ((None, state),):
            for tensor in tensors_in(value):
                self._role(tensor, OPTIMIZER_STATE, parameter, name or "state")

    def _adopt_again(self):
        """Find at the end what was assigned by hand: gradients, loaded state, parameters in another type."""
        for thing in list(self._met):
            self._adopt(thing)

    def _role(self, tensor, category, parameter=None, what=None):
        """Give `tensor` a category; and the owner of `parameter`, of which it is the `what` (None: itself)."""
        owner = None if parameter is None else self._owners.of(parameter)
        for record in self._of(tensor):
            record.roles.add(category)
            if owner is not None:
                record.owners[(*owner, what)] = None

    def _watch_gradient(self, leaf):
        """See `leaf.grad` whenever autograd has written it, before any hook of the user's may free it."""
        if not leaf.is_leaf:  # functional_call puts other tensors in a parameter's place
            return
        if leaf.grad is not None:
            self._role(leaf.grad, GRADIENTS, leaf, "gradient")
        if not leaf.requires_grad:
            return
        hooks = leaf._post_accumulate_grad_hooks
        if hooks is None or self._gradient_written not in hooks.values():
            handle = leaf.register_post_accumulate_grad_hook(self._gradient_written)
            hooks = leaf._post_accumulate_grad_hooks
            for earlier in [key for key in hooks if key != handle.id]:
                hooks[earlier] = hooks.pop(earlier)  # run in order of insertion: ours is the first now
            self._hooks.append(handle)

    def _gradient_written(self, leaf):
        if leaf.grad is not None:  # an undefined one, of a double backward
            self._role(leaf.grad, GRADIENTS, leaf, "gradient")
