"""GradientCompressor: what is sent of a gradient, what is kept for the next step, and when that counts.

    x = g + e        the gradient, and what was never sent
    p = encode(x)    what is sent: really so small, one tensor of bytes or numbers
    e = x − decode(p)

e is kept in fp32 (fp64 for fp64 gradients), so what the wire's dtype rounds away is kept, too: 4 bytes of each
gradient's element on each rank, and 4 more from backward to step. The new e counts when the step is made. If it is not,
as after an overflow, the one before stays, as if the batch had not been.
"""

import zlib
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from .int8 import Int8
from .powersgd import FactorLayout
from .random_k import RandomK
from .reduction import Reductions, finite_or
from .sign import Sign
from .threshold import Threshold
from .topk import TopK

FLAT = {"topk": TopK, "threshold": Threshold, "random": RandomK, "int8": Int8, "sign": Sign}
ALGORITHMS = (*FLAT, "powersgd")


class Payload(NamedTuple):
    """Holds what is sent of a gradient: `data`, flat; `nbytes` counts it. The rest is known to the receiver and not
    sent.

    `shape`: of the gradient. `seed`: which random elements were drawn, equal on all ranks.
    """

    data: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype  # of the numbers that are sent
    seed: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that are sent."""
        return self.data.nbytes


class GradientCompressor(Reductions):
    """Compresses gradients before they are sent. Give one to an engine, `Zero1(model, comm, hook=compressor)`; or call
    `compress` and `decompress`.

    - `algorithm`: "topk", "threshold", "random" (a few numbers of many), "int8", "sign" (few bits of each), "powersgd"
      (two thin matrices for each).
    - `ratio`: the part of the numbers that is sent, in (0, 1]; at least one number. "int8" and "sign" send all.
    - `error_feedback`: keep what is not sent, and add it in the next step.
    - `warmup`: steps whose gradients are sent whole, in the beginning.
    - `seed`: of the places of "random" and the first factors of "powersgd", the same on all ranks.
    - `rank`: of powersgd's factors, in place of `ratio`.
    - `loss_scale`: a function that returns the loss scale, such as `scaler.get_scale`, if the loss is scaled: what is
      kept is divided by it, since it changes.

    ValueError for an unknown algorithm, and values out of range; TypeError for gradients that are not floats. After an
    inf or NaN in a gradient all that is sent of its bucket has some, so that all ranks see it.
    """

    def __init__(self, algorithm: str = "topk", ratio: float = 0.01, error_feedback: bool = True, *, warmup: int = 0,
                 seed: int = 0, rank: int | None = None, loss_scale: Callable[[], float] | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
        if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: expected the part of the numbers that is sent, above 0 and at most 1")
        for name, value, least in (("warmup", warmup, 0), ("seed", seed, 0), ("rank", rank, 1)):
            if (value is not None or name != "rank") and (not isinstance(value, int) or isinstance(value, bool)
                                                          or value < least):
                raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
        if rank is not None and algorithm != "powersgd":
            raise ValueError(f'rank={rank} with algorithm={algorithm!r}: powersgd alone has factors of a rank')
        self.algorithm, self.ratio, self.error_feedback = algorithm, ratio, bool(error_feedback)
        self.warmup, self.seed, self.rank, self.loss_scale = warmup, seed, rank, loss_scale
        self.coder = FLAT[algorithm](ratio) if algorithm in FLAT else None  # powersgd has a FactorLayout of each bucket
        self.steps = 0
        self.kept, self._pending = {}, {}  # key → {"residual": (n,), "q": powersgd's factors}; those of this step
        self.comm, self.layouts = None, ()

    def __repr__(self):
        how = f"rank {self.rank}" if self.rank else f"ratio {self.ratio}"
        return (f"GradientCompressor({self.algorithm}, {how}, {'' if self.error_feedback else 'no '}error feedback, "
                f"warmup {self.warmup}, seed {self.seed})")

    def payload_bytes(self, shape: Sequence[int], itemsize: int = 4) -> int:
        """Return the bytes that are sent of one tensor of this shape, whose elements have `itemsize` bytes."""
        shape = torch.Size(shape)
        return self.coder.payload_bytes(shape.numel(), itemsize) if self.coder else FactorLayout(
            [shape], self.ratio, self.rank).payload_bytes(itemsize)

    # --- one tensor --------------------------------------------------------------------------------------------------

    def compress(self, x: torch.Tensor, key: object = 0) -> Payload:
        """Return the Payload of a gradient; what it leaves out is added in the next call with this `key`.

        `key`: the gradient's number or name. "random" draws other places after each `step()`. TypeError for a gradient
        that is not of floats. powersgd's factors are those of this rank alone.
        """
        compensated = self.compensated(key, x.reshape(-1), "compress(x)")
        seed = self.seed_of(key)
        if self.coder is None:
            data, sent, q = self._alone(key, compensated, x)
        else:
            data, q = self.coder.encode(compensated, x.dtype, seed), None
            self.coder.add(sent := torch.zeros_like(compensated), data, x.dtype, seed)
        self.keep_residual(key, compensated, sent, q)
        self.kept[key] = self._valid(key, self._pending.pop(key))
        return Payload(data, x.shape, x.dtype, seed)

    def decompress(self, payload: Payload) -> torch.Tensor:
        """Return the tensor that was sent, in the shape and dtype of the gradient; zeros for what was left out."""
        wide = _wide(payload.dtype)
        out = torch.zeros(payload.shape.numel(), dtype=wide, device=payload.data.device)
        if self.coder is None:
            layout, data = FactorLayout([payload.shape], self.ratio, self.rank), payload.data.to(wide)
            layout.write_average([out.view(payload.shape)], *data.split([layout.whole_numel, sum(layout.p_sizes),
                                                                 sum(layout.q_sizes)]))
        else:
            self.coder.add(out, payload.data, payload.dtype, payload.seed)
        return out.to(payload.dtype).view(payload.shape)

    def _alone(self, key, compensated, x):
        """Return powersgd's payload of one tensor, what was sent, and the next Q."""
        layout, tensors = FactorLayout([x.shape], self.ratio, self.rank), [compensated.view(x.shape)]
        first = layout.first_payload(tensors, before := self.factors(key, layout, compensated))
        p = first[layout.whole_numel :]
        q = layout.second_payload(tensors, p)
        data = torch.cat([first, q]).to(x.dtype)
        sent = self.decompress(Payload(data, x.shape, x.dtype, 0)).view(-1).to(compensated.dtype)
        return data, sent, finite_or(q, before)

    # --- what is kept ------------------------------------------------------------------------------------------------

    def compensated(self, key: object, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return a flat gradient plus what was not sent of it before, as a new tensor."""
        if not flat.is_floating_point():
            raise TypeError(f"{name}: gradients of {flat.dtype}: expected floats, such as torch.float32")
        x = flat.detach().to(_wide(flat.dtype), copy=True)  # a copy: the residual is written over it
        residual = self._latest(key).get("residual")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"{name}: {x.numel()} numbers for key {key!r}, whose residual has {residual.numel()}: "
                             "give each gradient a key of its own")
        return x if residual is None else x.add_(residual, alpha=self._scale())

    def keep_residual(self, key: object, compensated: torch.Tensor, sent: torch.Tensor, q: Any = None) -> None:
        """Keep what was not sent (written over `compensated`), and powersgd's factors, until `step` or `drop`."""
        kept = {} if q is None else {"q": q}
        if self.error_feedback:
            kept["residual"] = compensated.sub_(sent)
            if self.loss_scale is not None:
                kept["residual"].div_(self._scale())
        self._pending[key] = kept

    def factors(self, key: object, layout: Any, like: torch.Tensor) -> Any:
        """Return a copy of powersgd's last Q's; the first time drawn ones."""
        q = self._latest(key).get("q")
        if q is not None:
            return q.clone()
        return layout.draw_factors(self.seed if isinstance(key, int) else self.seed_of(key) % 2**32,
                            key if isinstance(key, int) else 0, like)

    def step(self) -> None:
        """Use the residuals of this step from now on: the optimizer's step was made."""
        for key, kept in self._pending.items():
            self.kept[key] = self._valid(key, kept)
        self._pending.clear()
        self.steps += 1

    def drop(self) -> None:
        """Drop the residuals since the last step: the optimizer's step is not made."""
        self._pending.clear()

    def seed_of(self, key: object, chunk: int = 0) -> int:
        """Return the seed of a bucket, or of a chunk of it, in this step."""
        # Not hash(): that of a text differs from process to process.
        return zlib.crc32(f"{self.seed} {self.steps} {key} {chunk}".encode())

    def _latest(self, key):
        return self._pending.get(key) or self.kept.get(key, {})

    def _valid(self, key, kept):
        """Return what is kept, each as it was before if it is not finite now: the gradient was not."""
        before = self.kept.get(key, {})
        return {name: finite_or(x, before.get(name, x.new_zeros(()))) for name, x in kept.items()}

    def _scale(self):
        return 1 if self.loss_scale is None else float(self.loss_scale())


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32
