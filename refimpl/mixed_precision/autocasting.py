"""autocast: inside a region, each operation runs in the type that its kind needs; the weights stay in fp32."""

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._contextlib import _DecoratorContextManager

from .internals import casting_kernels, recompute
from .internals.autocast_regions import AutocastRegion, current, set_stack, state
from .internals.support import check_computes, check_device, check_dtype


class autocast(_DecoratorContextManager):
    """Run each operation in the type that its kind needs; the weights stay in fp32.

    `with autocast(torch.bfloat16): loss = model(tokens, targets)`; call `loss.backward()` outside. Also a decorator.

    - `dtype`: `torch.bfloat16` or `torch.float16`, for the operations that run low (see `internals/lists.py`).
    - `device_type`: whose tensors are cast, "cpu" or "cuda"; by default CUDA's where there is a GPU, else the CPU's.
    - `enabled=False`: inside another region, operations run as called (their inputs may be low: `x.float()`).
    - `cache`: cast each weight once in the region, not at each use.

    Regions nest, and the innermost counts. A region belongs to the thread that entered it. Its results may be 16-bit:
    to compute with one outside in fp32, cast it, `y.float()`.

    - `torch.autocast` and `torch.amp.custom_fwd` do not know of these regions. Where both are open, `torch.autocast`
      decides.
    - A weight that is written to is cast anew, except after a write through `weight.data[...]`, which PyTorch does not
      record: write under `torch.no_grad()`.
    - `torch.compile` breaks its graph where a region begins and ends. `torch.export` cannot record one: opened inside
      an export it raises RuntimeError. Run the exported program in a region.

    Raises ValueError for another dtype or device, and for a dtype that the device cannot compute in.
    """

    @torch._disable_dynamo
    def __init__(self, dtype: torch.dtype = torch.bfloat16, device_type: str | None = None, *, enabled: bool = True,
                 cache: bool = True) -> None:
        super().__init__()
        self.device_type, self.dtype = check_device(device_type), check_dtype(dtype)
        self.enabled, self.cache = bool(enabled), bool(cache)
        if self.enabled:
            check_computes(self.device_type, self.dtype)

    @torch._disable_dynamo  # it changes thread state, which a compiled graph would not record
    def __enter__(self) -> Self:
        if torch.compiler.is_exporting():
            raise RuntimeError("torch.export keeps no casts of autocast, so the exported program would run without "
                               "them: export the model without autocast, and run the exported program inside "
                               "`with autocast(…)`")
        casting_kernels.register(self.device_type)
        outer, dtype = current(self.device_type), self.dtype if self.enabled else None
        casts, shared = {} if self.cache and self.enabled else None, False
        if casts is not None and outer is not None and outer.dtype is dtype and outer.casts is not None:
            casts, shared = outer.casts, True
        recompute.region_opened()
        set_stack((*state().stack, AutocastRegion(self, self.device_type, dtype, casts, shared)))
        return self

    @torch._disable_dynamo
    def __exit__(self, *exception: object) -> None:
        stack = list(state().stack)
        mine = [region for region in stack if region.owner is self]
        if not mine:
            raise RuntimeError(f"{self!r} was not entered in the thread that leaves it (was a generator continued in "
                               "another thread?): enter and leave it in the same thread")
        stack.remove(mine[-1])  # not always the top: generators may close in any order
        set_stack(stack)
        if mine[-1].casts is not None and not mine[-1].shared:
            mine[-1].casts.clear()
        recompute.region_closed()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate: every call of `function` (or every stretch of a generator) is a region of its own."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"autocast cannot decorate {function.__name__}, which is async: its body runs later, "
                            "between other tasks; write `with autocast(…)` around the operations inside it")
        return super().__call__(function)

    def clone(self) -> "autocast":
        """Return a region with the same options (for one call of a decorated function)."""
        return type(self)(self.dtype, self.device_type, enabled=self.enabled, cache=self.cache)

    def __repr__(self):
        return f"autocast({self.dtype}, {self.device_type!r}, enabled={self.enabled}, cache={self.cache})"
