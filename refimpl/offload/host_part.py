"""The part of one shard that rests in host memory: masters and moments side by side, gradients on their way there."""

import torch

from ..common.marks import mark
from .copies import HOST_MEMORY, TO_HOST

ALIGNMENT = 64  # elements: the host's part ends where vectors of a kernel do
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's Adam names them


def host_numel(numel, ratio):
    """Return n, how many of a shard's elements are in host memory."""
    return numel if ratio == 1 else int(ratio * numel) // ALIGNMENT * ALIGNMENT


class HostPart:
    """Elements 0 … n − 1 of a bucket's shard, n = `ratio` of all, rounded down to a multiple of 64; all at ratio 1.

    `master` (n,) fp32; `moments` 2 × (n,) fp32, from the first step on; `gradient` (n,) in the dtype of gradients, from
    the first gradient on. The other elements' are on the device: `device_master`, fp32, which is the shard itself if
    that is fp32, and `device_gradient`. TypeError for a dtype that is not fp32, bf16 or fp16.
    """

    def __init__(self, bucket, shard, ratio, link):
        if shard.dtype not in DTYPES:
            raise TypeError(f"{bucket.name}: parameters of {shard.dtype}: CPUAdam has fp32 masters, and takes "
                            f"{', '.join(map(str, DTYPES))}")
        self.name, self.device, self.link = bucket.name, shard.device, link
        self.n = host_numel(shard.numel(), ratio)
        link.expect(shard.dtype, shard.device, self.n)
        self.master = _on_host(torch.empty, self.n).copy_(shard[: self.n])
        rest = shard[self.n :]
        self.device_master = rest if shard.dtype == torch.float32 else mark(rest.float(), "optimizer state")
        self.moments = self.gradient = self.device_gradient = None
        self._copy = self._further = None  # of a gradient; (scratch, Copy) of one that is to be added

    # --- pieces and their states -------------------------------------------------------------------------------------

    def cut(self, piece):
        """Return a piece; in two if it is in both memories."""
        inside = self.n - piece.place
        if not 0 < inside < piece.end - piece.first:
            return [piece]
        middle = piece.first + inside
        return [piece._replace(end=middle), piece._replace(first=middle, place=self.n)]

    def on_host(self, piece):
        """Tell whether a piece is in host memory."""
        return piece.place < self.n

    def _view(self, piece, on_host, on_device):
        place = piece.place if self.on_host(piece) else piece.place - self.n
        return (on_host if self.on_host(piece) else on_device)[place : place + piece.end - piece.first]

    def master_of(self, piece):
        """Return what the optimizer updates of a piece: its part of the masters."""
        return self._view(piece, self.master, self.device_master)

    def state_of(self, piece, state):
        """Return the optimizer's state of a piece; its moments are views of `moments` from now on. What a load has put
        there is copied."""
        if self.moments is None:
            self.moments = [_on_host(torch.zeros, self.n) for _ in MOMENTS]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for name, moment in zip(MOMENTS, self.moments, strict=True):
            view, kept = self._view(piece, moment, None), state.get(name)
            if kept is None or kept.untyped_storage()._cdata != moment.untyped_storage()._cdata:
                state[name] = view if kept is None else view.copy_(kept)
        return state

    def states(self):
        """Return the tensors that a store below host memory takes."""
        return [self.master, *(self.moments or ())] if self.n else []

    @torch.no_grad()
    def copy_(self, shard):
        """Copy a shard's values into the masters."""
        self.master.copy_(shard[: self.n])
        if self.device_master.dtype != shard.dtype:
            self.device_master.copy_(shard[self.n :])

    @torch.no_grad()
    def follow(self, shard):
        """Take what was written to the shard into the masters, where it is not what they are rounded to."""
        for master, part in ((self.master, shard[: self.n]), (self.device_master, shard[self.n :])):
            part = part.to(master.device)
            master.copy_(torch.where(part == master.to(part.dtype), master, part.to(master.dtype)))

    @torch.no_grad()
    def round_into(self, shard):
        """Round all masters into the shard."""
        shard[: self.n].copy_(self.master)
        self.round_on_device(shard)

    @torch.no_grad()
    def round_on_device(self, shard):
        """Round the device's masters into the shard."""
        if self.device_master.dtype != shard.dtype:
            shard[self.n :].copy_(self.device_master)

    # --- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_gradient(self, shard, first):
        """Begin to copy the host's part of a shard of gradients. If it is not the `first` since the last step, it is
        added to those before."""
        here, rest = shard[: self.n], shard[self.n :]
        if not first:
            self.wait_for_gradients()
            self._further = self.link.add(self, here, self.name)
            self.device_gradient += rest
            return
        if self.gradient is None or self.gradient.dtype != shard.dtype:
            # kept from step to step: page-locking memory takes long
            self.gradient = self.link.allocate(self.n, shard.dtype, self.device)
        if self.n:
            self._copy = self.link.start(TO_HOST, self.gradient, here, self.name)
        alone = shard.untyped_storage().nbytes() == shard.nbytes
        # a view of the rest would keep the host's part on the device, too
        self.device_gradient = mark(rest.clone(), "gradients") if alone and self.n else rest

    def own_gradient(self):
        """Copy the device's part if it is part of a whole buffer."""
        self.device_gradient = mark(self.device_gradient.clone(), "gradients")

    def wait_for_gradients(self):
        """Wait until all gradients are in host memory, and added up."""
        if self._copy is not None:
            self._copy.finish()
            self._copy = None
        if self._further is not None:
            (scratch, copy), self._further = self._further, None
            copy.finish()
            self.gradient += scratch[: self.n]
            self.link.mark_added(self, scratch, self.device)

    def gradient_of(self, piece):
        """Return the gradient of a piece."""
        return self._view(piece, self.gradient, self.device_gradient)

    def drop_gradient(self, free):
        """Forget the gradients. `free`: the host memory, too."""
        self.wait_for_gradients()
        self.device_gradient = None
        if free:
            self.gradient = None


def _on_host(make, numel):
    return mark(make(numel, dtype=torch.float32, device="cpu"), HOST_MEMORY)
