"""Offload in one screen: the states of Adam rest in a file, and the host computes the update.

A parameter of a 16-bit model takes 2 bytes, its gradient 2, its fp32 master and Adam's moments 12. The 12 are needed in
the update alone, which reads and writes each number once: so little is computed that the host does it as it reads.

    in a step            device → host          host                                      host → device
    2 bytes              gradient g                                                       weight p
    12 there and back                           file → m, v, master → file

    m ← m + (1 − β₁)(g − m)     v ← β₂ v + (1 − β₂) g²     p ← (1 − η w) p − η/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

The device holds 2 + 2 bytes of each parameter, the file 12, the host two tensors' states: one that is updated, and one
that is read meanwhile. "ZeRO-Offload" (Ren et al. 2021), section 4; "ZeRO-Infinity" (Rajbhandari et al. 2021), 5.2.
"""

from concurrent.futures import ThreadPoolExecutor

import torch


class FileStore:
    """Keep fp32 tensors in a file while nobody computes with them: `put`, `prefetch`, then `get`. One thread writes and
    reads, in order, so that a `get` finds what was put last."""

    def __init__(self, path):
        self.file, self.place, self.end = open(path, "w+b", buffering=0), {}, 0  # key → where, shapes
        self.thread, self.coming = ThreadPoolExecutor(1), {}

    def put(self, key, tensors):
        """Write the tensors. Their memory is free when that is done, unless the caller keeps them."""
        self.thread.submit(self.write, key, tensors)

    def write(self, key, tensors):
        """Write tensors at the key's place, at the end of the file if it has none."""
        if key not in self.place:
            self.place[key] = self.end, [x.shape for x in tensors]
            self.end += sum(x.nbytes for x in tensors)
        self.file.seek(self.place[key][0])
        for x in tensors:
            self.file.write(x.numpy())

    def prefetch(self, key):
        """Begin to read a key's tensors."""
        self.coming[key] = self.thread.submit(self.read, key)

    def read(self, key):
        """Read them into new memory."""
        tensors = [torch.empty(shape) for shape in self.place[key][1]]
        self.file.seek(self.place[key][0])
        for x in tensors:
            self.file.readinto(x.numpy())
        return tensors

    def get(self, key):
        """Return the tensors when they are read."""
        if key not in self.coming:
            self.prefetch(key)
        return self.coming.pop(key).result()


class HostAdamW:
    """Train a model on a device, with states in a store: `loss.backward()` and `step()`, in turn."""

    def __init__(self, model, store, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
        self.parameters, self.store, self.t = list(model.parameters()), store, 0
        self.lr, self.betas, self.eps, self.decay, self.gradients = lr, betas, eps, decay, {}
        for i, p in enumerate(self.parameters):
            master = p.detach().to("cpu", torch.float32, copy=True)
            store.put(i, [master, torch.zeros_like(master), torch.zeros_like(master)])
            p.register_post_accumulate_grad_hook(lambda p, i=i: self.arrived(p, i))

    def arrived(self, p, i):
        """Copy a gradient to the host as soon as it is computed, and free the device's."""
        self.gradients[i], p.grad = p.grad.to("cpu", copy=True), None

    @torch.no_grad()
    def step(self):
        """Update one parameter after the other; the next one's states are read meanwhile."""
        self.t, (b1, b2) = self.t + 1, self.betas
        for i, p in enumerate(self.parameters):
            master, m, v = self.store.get(i)
            if i + 1 < len(self.parameters):
                self.store.prefetch(i + 1)
            g = self.gradients.pop(i).float()
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            master.mul_(1 - self.lr * self.decay)
            master.addcdiv_(m, (v.sqrt() / (1 - b2**self.t) ** 0.5).add_(self.eps), value=-self.lr / (1 - b1**self.t))
            p.copy_(master)
            self.store.put(i, [master, m, v])
