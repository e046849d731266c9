"""Compression of what autograd saves: in fewer bytes from its forward to its backward, in its own dtype in backward.

    lossless   masks in bits: boolean ones, and two-valued ones of any type (dropout's noise on a CPU)
    bf16       that, and fp32 activations rounded to bfloat16
    int8       that, and floating activations in 8 bits each, by groups that share a least value and a step

Only what a gradient flows through is rounded: a tensor that needs no gradient is a statistic, a label, a table or a
mask, and one value a row (the 1/σ of a norm) is a statistic, too. Gradients of parameters before a rounded tensor are
those of slightly other activations; the forward and its loss are untouched.
"""

import weakref
from typing import Any

import torch

from .codecs import (
    cast_bytes,
    encode_bits,
    encode_cast,
    encode_groups,
    encode_two_values,
    group_bytes,
    has_values,
    mask_bytes,
)
from .saved_tensors import PackedStorage, SavedStorages

METHODS = ("lossless", "bf16", "int8")
ROUNDED = {"bf16": (torch.float32, torch.float64),
           "int8": (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
MASKS = "masks, 1 bit"
KINDS = {"bf16": "activations, bf16", "int8": "activations, 8 bits"}
WIDEST = 0.25  # step of log-probabilities: backward takes exp of them, so each may be off by a factor of exp(1/8)
SMALLEST = 4096  # bytes: compressing a smaller storage costs more time than its bytes are worth
_generators = {}  # device -> generator for stochastic rounding; it is not reset between contexts


def compress_activations(model: torch.nn.Module, method: str = "int8", *, group: int = 128, stochastic: bool = False,
                         smallest: int = SMALLEST, only: Any = None, seed: int | None = None) -> Any:
    """Keep compressed activations until backward: `with compress_activations(model) as c: loss = model(x)`.

    Backward may run inside or after the context. `compressed_activation_bytes` predicts the bytes; `c.report` tells
    what was packed, what was left and why.

    - `method`: "lossless" packs masks (boolean, or of two values) into bits; "bf16" also rounds fp32 and fp64
      activations to bfloat16, off by 2⁻⁸ of a value at most; "int8" rounds floating ones to 8 bits instead, by groups:
      step = (max − min) / 255, code = round((x − min) / step), so |x − x̂| ≤ step / 2, as ActNN does (Chen et al. 2021).
      Tensors that need no gradient and those of one value a row, such as 1/σ (…, 1), are never rounded.
    - `group`: int8, how many values share a least value and a step (8 bytes a group).
    - `stochastic`: int8, round up or down at random, right in the mean. The numbers come from a generator of its own
      that goes on from context to context; with a `seed`, from one that begins there. torch's own is not touched.
      Without a seed each process draws the same numbers, and errors of several ranks do not average out: give each rank
      a seed of its own, and enter one context in all steps (a new one begins anew).
    - `smallest`: storages of fewer bytes are left. `only`: patterns of module names, e.g. `"blocks.*"`, which
      leaves the log-probabilities of the loss alone; None: all.

    Eight bits suit values of one scale: a group with one of −1e9 in it knows the others to ±2e6. Log-probabilities that
    far apart (a step above 0.25) are left; mask other scores with −inf, which leaves them, too. In bf16 what is above
    3.39e38, such as `torch.finfo(torch.float32).max`, becomes inf.

    A copy is compressed, so what is changed in place afterwards still has the gradient of what it was. A storage with
    inf or NaN is not rounded in 8 bits (on CUDA, looking for them waits for the device). A fake tensor has no values:
    in a dry run it is taken for finite, and for a mask only if it is boolean. What a custom `autograd.Function` (or
    `torch.compile`, which makes one) computes for itself needs no gradient and is left. Around a `checkpoint` this
    packs the inputs of its region; inside one, it packs what the region would recompute.

    Raises ValueError for a method, a group, a threshold, a seed or a pattern that does not exist, and `stochastic` or a
    `seed` that nothing would use; TypeError for a model that is no module; RuntimeError when entered twice at once.
    """
    return CompressActivations(model, method, group, stochastic, smallest, only, seed)


def check_method(method, group):
    """Raise ValueError for an unknown method, and for a group below 1."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected {', '.join(map(repr, METHODS))}")
    if type(group) is not int or group < 1:
        raise ValueError(f"group={group!r}: expected an integer of at least 1, the values that share a range")


class CompressActivations(SavedStorages):
    """See `compress_activations`."""

    def __init__(self, model, method, group, stochastic, smallest, only, seed):
        super().__init__(model, smallest, only)
        check_method(method, group)
        if stochastic and method != "int8":
            raise ValueError(f"stochastic={stochastic!r} with method={method!r}: expected method='int8', which rounds "
                             "to steps; leave it out")
        if seed is not None and not stochastic:
            raise ValueError(f"seed={seed!r} without stochastic=True has no effect: give both, or leave the seed out")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
            raise ValueError(f"seed={seed!r}: expected an integer from 0 to 2**64 - 1")
        self.method, self.group, self._stochastic, self._seed = method, group, stochastic, seed
        # without a seed the numbers go on from context to context
        self._generators = _generators if seed is None else {}

    def refuse(self, tensor):
        """Refuse complex, integer and 8-bit types, which cannot be rounded, unless they are masks."""
        if is_mask_type(tensor) or self._is_rounded(tensor):
            return None
        if not tensor.requires_grad:
            return "left: needs no gradient"
        if tensor.dtype.is_floating_point and self.method == "lossless":
            return "left: not a mask"
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and is_one_a_row(tensor):
            return "left: one value a row"
        return f"left: {str(tensor.dtype).removeprefix('torch.')}"

    def _is_rounded(self, tensor):
        return tensor.requires_grad and tensor.dtype in ROUNDED.get(self.method, ()) and not is_one_a_row(tensor)

    def store(self, flat, tensor):
        """Store a mask as bits and anything else rounded; leave it if that is no smaller."""
        n, nbytes = flat.numel(), tensor.untyped_storage().nbytes()
        if not self._is_rounded(tensor):
            after = mask_bytes(n, flat.dtype.itemsize)  # before encoding: nothing is computed in vain
            if after >= nbytes:
                return "left: would not be smaller"
            code = encode_bits(flat) if flat.dtype is torch.bool else encode_two_values(flat)
            return (MASKS, after, Compressed(tensor, code)) if code else "left: needs no gradient"
        after = cast_bytes(n) if self.method == "bf16" else group_bytes(n, self.group)
        if after >= nbytes:
            return "left: would not be smaller"
        code = encode_cast(flat) if self.method == "bf16" else encode_groups(flat, self.group, self._numbers(flat))
        if self.method == "int8" and code and is_log(tensor) and has_values(flat) and code.ranges[1].max() > WIDEST:
            return "left: logarithms too far apart"
        return (KINDS[self.method], after, Compressed(tensor, code)) if code else "left: inf or NaN in it"

    def _numbers(self, flat):
        if not self._stochastic or flat.is_meta:
            return None
        if flat.device not in self._generators:
            self._generators[flat.device] = torch.Generator(flat.device).manual_seed(self._seed or 0)
        return self._generators[flat.device]


def is_mask_type(tensor):
    """Tell whether the tensor may be a mask: boolean, or of two values (to be looked at) and in need of no gradient."""
    return tensor.dtype is torch.bool or not (
        tensor.requires_grad or tensor.dtype.is_complex or tensor.dtype.itemsize == 1)


def is_one_a_row(tensor):
    """Tell whether the tensor has one value for each row of something larger."""
    return tensor.dim() == 0 or tensor.shape[-1] == 1


def is_log(tensor):
    """Tell whether the tensor is a log_softmax's output. Where −1e9 masked the scores, its values are far apart."""
    return tensor.grad_fn is not None and type(tensor.grad_fn).name(tensor.grad_fn) == "LogSoftmaxBackward0"


class Compressed(PackedStorage):
    """A storage's code. What is decoded is shared while it is in use: an operation that saved a tensor twice
    decodes it once, and nothing is held for the next operation."""

    def __init__(self, tensor, code):
        super().__init__(tensor)
        self._code, self._decoded, self._device = code, None, tensor.device  # a storage's own is meta in a dry run

    def restore(self):
        """Return the flat content: decode it, or share what is decoded already."""
        storage = self._decoded() if self._decoded else None
        if storage is None:
            flat = self._code.decode()
            self._decoded = weakref.ref(flat.untyped_storage())  # weak: autograd drops it after the operation
            return flat
        return torch.empty(0, dtype=self._code.dtype, device=self._device).set_(storage)
