"""Which storage is copied when: out in the order of the forward, back in reverse order, each shortly before its use.

Pure order; the copies are made by a transfer that it is given. A transfer has `to_host(flat)` and `to_device(host,
device)`, each returning the copy and a ticket at once, and `wait(ticket)`, after which the copy may be used and its
source given away.
"""

import threading
import weakref
from collections import deque

import torch

from ..saved_tensors import PackedStorage


class Offloaded(PackedStorage):
    """Holds a storage in host memory. `copy`: the copy fetched to the device, until all operations have used it."""

    def __init__(self, tensor, schedule, index, host):
        super().__init__(tensor)
        self.schedule, self.index, self.host, self.device = schedule, index, host, tensor.device
        self.overwritten = None  # (version now, version when it was sent) if it was written to meanwhile
        self.copy = self.ticket = None
        self.taken, self.done = 0, False  # by how many operations; whether by all of them

    def restore(self):
        """Return its flat content on the device."""
        return self.schedule.reload(self)


class TransferSchedule:
    """Orders the copies of one forward: at most `depth` are in flight to the host, and `depth` are prefetched."""

    def __init__(self, transfer, depth):
        self._transfer, self._depth = transfer, depth
        self._order = []  # weak references to the Offloaded, in the order of sending
        self._leaving = deque()  # (flat, its version, ticket, weak reference to the Offloaded)
        self._backward = self._first = None  # autograd's id of the backward that fetches; what it reloaded first
        self._lock = threading.RLock()  # autograd has one thread for each CUDA device

    # --- forward ----------------------------------------------------------------------------------------------------

    def send(self, flat, tensor):
        """Start the copy to the host. Returns the Offloaded."""
        with self._lock:
            host, ticket = self._transfer.to_host(flat)
            stored = Offloaded(tensor, self, len(self._order), host)
            self._order.append(weakref.ref(stored))  # weak: autograd holds it as long as backward may need it
            self._leaving.append((flat, flat._version, ticket, self._order[-1]))
            self.wait(self._depth)  # at most `depth` copies hold device memory
            return stored

    def wait(self, left=0):
        """Wait until at most `left` storages are on their way; the device memory of the others is free.

        A storage that was written to while it was copied is marked: `reload` refuses it.
        """
        with self._lock:
            while len(self._leaving) > left:
                flat, version, ticket, reference = self._leaving[0]
                self._transfer.wait(ticket)
                self._leaving.popleft()  # after the wait: if that is interrupted, the copy still needs `flat`
                stored = reference()
                if stored is not None and flat._version != version:
                    stored.overwritten = flat._version, version

    # --- backward ---------------------------------------------------------------------------------------------------

    def reload(self, stored):
        """Return the content on the device and prefetch what was sent before it. RuntimeError if it was overwritten.

        Nothing is fetched ahead of what a backward takes first: that is the loss's, logits as a rule, and there most
        steps have their peak."""
        with self._lock:
            self.wait()
            if stored.overwritten:
                now, then = stored.overwritten
                raise RuntimeError("one of the variables needed for gradient computation has been modified by an "
                                   f"inplace operation while it was copied to the host: {stored.described} is at "
                                   f"version {now}, expected version {then}")
            if self._begin(torch._C._current_graph_task_id()):
                self._first = stored.index
            self._fetch(stored)
            if stored.index != self._first:
                self._fetch_ahead(stored.index)
            self._transfer.wait(stored.ticket)
            flat, stored.taken = stored.copy, stored.taken + 1
            if stored.taken == stored.views:  # all operations that saved it have taken it
                stored.copy, stored.done = None, True
            if self._backward == -1:  # not in a backward: a node's saved tensor is inspected
                self.forget()
            return flat

    def _begin(self, task):
        """Schedule `forget` for the end of a backward, at its first `reload`; return whether it is that."""
        if task == self._backward:
            return False
        self.forget()
        self._backward = task
        if task != -1:
            schedule = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(schedule()))
        return True

    def _fetch(self, stored):
        if stored.copy is None:
            stored.copy, stored.ticket = self._transfer.to_device(stored.host, stored.device)

    def _fetch_ahead(self, index):
        ahead = 0
        while index > 0 and ahead < self._depth:
            index -= 1
            stored = self._order[index]()
            if stored is not None and not stored.done:
                self._fetch(stored)
                ahead += 1

    def forget(self):
        """Drop copies that were fetched and not used, and reset, since a retained graph may run again."""
        with self._lock:  # another thread's backward may be in `reload`
            self._backward = None
            for stored in filter(None, (reference() for reference in self._order)):
                if stored.copy is not None:
                    self._transfer.wait(stored.ticket)  # before the memory is reused
                stored.copy, stored.taken, stored.done = None, 0, False
            while self._order and self._order[-1]() is None:  # a region may span many steps
                self._order.pop()


def _forget(schedule):
    if schedule is not None:
        schedule.forget()
