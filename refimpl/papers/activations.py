"""Compressed activations in one screen: what autograd saves in forward takes 8 bits a value until backward reads it.

autograd shows each tensor x that it saves to a pair of hooks: `pack(x)` returns what is kept in its place, `unpack` is
given that in backward and returns a tensor. Here it is a code. Each group of g values has a least value and a step:

    step = (max − min) / 255        code = round((x − min) / step)        x̂ = min + code · step,   |x − x̂| ≤ step / 2
    bytes     n + 8·⌈n/g⌉         instead of         4n in fp32         (g = 128: 1.06 bytes a value)

Groups keep one large value from spoiling the others' steps. The forward and its loss stay as they were; gradients are
those of slightly other activations. "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
Training" (Chen et al. 2021), sections 3.1 and 4.1; it rounds at random, here to the nearest.
"""

import weakref
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks


def encode(flat_n, group):
    """Return the codes (n,) in 8 bits, and min and step of each group, (groups, 1) fp32 each."""
    n = flat_n.numel()
    rows_Gg = flat_n.new_empty(-(-n // group), group, dtype=torch.float32)
    rows_Gg.view(-1)[:n], rows_Gg.view(-1)[n:] = flat_n, flat_n[-1]  # a short last group: repeat its last value
    least_G1, most_G1 = rows_Gg.aminmax(dim=1, keepdim=True)
    step_G1 = (most_G1 - least_G1) / 255
    rows_Gg.sub_(least_G1).div_(torch.where(step_G1 > 0, step_G1, 1)).round_()  # in place: n fp32 values are enough
    return rows_Gg.view(-1)[:n].to(torch.uint8), least_G1, step_G1


def decode(codes_n, least_G1, step_G1, group):
    """Return min + code · step, (n,) fp32."""
    rows_Gg = step_G1.new_empty(len(step_G1), group)
    rows_Gg.view(-1)[: codes_n.numel()] = codes_n
    return rows_Gg.mul_(step_G1).add_(least_G1).view(-1)[: codes_n.numel()]


class Packed:
    """Hold the code of one storage. Operations save views of it, so it is encoded once for all of them."""

    def __init__(self, x, group):
        whole_n = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        self.code, self.group, self.dtype = encode(whole_n, group), group, x.dtype
        self.decoded = None

    def unpack(self):
        """Return the storage's values (n,); while one operation still has them, they are not decoded again."""
        storage = self.decoded() if self.decoded else None
        if storage is not None:
            return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage)
        flat_n = decode(*self.code, self.group).to(self.dtype)
        self.decoded = weakref.ref(flat_n.untyped_storage())
        return flat_n


@contextmanager
def compressed(model, group=128):
    """Keep activations in 8 bits: `with compressed(model): loss = model(tokens, targets)`, then `loss.backward()`.

    What stays whole: parameters, their views and other leaves (their owners have them anyway), tensors that need no
    gradient (masks, statistics, labels), and one value a row (as 1/σ of a norm).
    """
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    packed = weakref.WeakKeyDictionary()  # storage -> (version, Packed), while autograd holds the latter

    @torch.no_grad()
    def pack(x):
        storage = x.untyped_storage()
        if not x.requires_grad or x.is_leaf or storage.data_ptr() in owned or x.dim() == 0 or x.shape[-1] == 1:
            return x.detach()  # detach: an operation that saves its own result would hold itself otherwise
        version, code = packed.get(storage, (None, lambda: None))
        code = code() if version == x._version else None
        if code is None:  # not yet encoded, or changed in place since
            code = Packed(x, group)
            packed[storage] = x._version, weakref.ref(code)
        return code, x.shape, x.stride(), x.storage_offset()

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        code, *view = kept
        with torch.no_grad():
            return code.unpack().as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield
