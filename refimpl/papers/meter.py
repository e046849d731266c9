"""A memory tracker in one screen: which bytes of a training step are parameters, gradients, optimizer state, the rest.

A tensor is a view of a storage, and only storages take memory: a weight and its transpose share one. So

    bytes(t) = Σ storage.nbytes() over the storages alive at time t          peak = the largest bytes(t)

A storage is born as the output of an operation, and dies with the last tensor on it. PyTorch shows both: a
`TorchDispatchMode` is handed every operation, those of backward and of the optimizer too, and sees what it returns; a
weak reference to the storage reports its end. It does not see what a kernel takes and returns inside one operation, nor
a storage that is resized.

What a storage is for is known later than its birth: the product of two matrices may become a gradient. So births and
deaths are written down, and added up by category at the end. The categories are those of "ZeRO" (Rajbhandari et al.
2020), section 3: model states, and the rest, which is activations, what autograd keeps for backward, and temporaries.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER_STATE, REST = "parameters", "gradients", "optimizer state", "activations and the rest"


class Tracker(TorchDispatchMode):
    """Track one training step: `with Tracker(model, optimizer, batch) as t: step()`, then `t.peak()`.

    What exists before the step is named: no operation of the step makes it.
    """

    def __init__(self, model, optimizer, *existing):
        super().__init__()
        self.alive = {}  # address of a storage -> its number; an address is used again after a death
        self.events = []  # (number, ± bytes), in order of time
        self.category = {}  # number -> category, once it is known
        self.hooks = [optimizer.register_step_post_hook(self.see_state)]  # the first step makes the state
        self.see_state(optimizer)
        for p in model.parameters():
            self.see(p, PARAMETERS)
            self.see_gradient(p)
            self.hooks.append(p.register_post_accumulate_grad_hook(self.see_gradient))
        for x in (*model.buffers(), *existing):
            self.see(x)

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*exception)

    def see_gradient(self, parameter):
        """Look at a parameter's gradient, as soon as backward has written it."""
        self.see(parameter.grad, GRADIENTS)

    def see_state(self, optimizer, *_):
        """Look at Adam's two moments, and its counter, of each parameter."""
        for x in tree_leaves(list(optimizer.state.values())):
            self.see(x, OPTIMIZER_STATE)

    def see(self, x, category=None):
        """Write down the birth of a tensor's storage if it is new, and its category if it is given."""
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage._cdata not in self.alive:
                number = self.alive[storage._cdata] = len(self.events)
                self.events.append((number, storage.nbytes()))
                weakref.finalize(storage, self.died, storage._cdata, number, storage.nbytes())
            if category:
                self.category[self.alive[storage._cdata]] = category

    def died(self, address, number, nbytes):
        """Write down the death of a storage."""
        del self.alive[address]
        self.events.append((number, -nbytes))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Run one operation, and look at what it returns."""
        outputs = operation(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            self.see(x)
        return outputs

    def peak(self):
        """Return {category: bytes} at the time with the most bytes."""
        now, peak = dict.fromkeys((PARAMETERS, GRADIENTS, OPTIMIZER_STATE, REST), 0), {}
        for number, nbytes in self.events:
            now[self.category.get(number, REST)] += nbytes
            if sum(now.values()) > sum(peak.values()):
                peak = dict(now)
        return peak
