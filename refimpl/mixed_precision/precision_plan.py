"""A dtype for each part of a model: embeddings and head in fp32, blocks in bf16, and casts only where two parts meet.

A plan maps patterns of module paths to dtypes, `{"*": "fp32", "blocks.*": "bf16"}`; DynamicPrecisionModel says how
patterns match. Autocast decides per operation and keeps fp32 weights. Here the weights themselves are in the dtype of
their part, and take its bytes:

    bytes of parameters = Σ over parameters of numel · itemsize(dtype of the module that owns it)

A BatchNorm's running statistics are sums over many steps, and 16 bits would lose most of them. Where they are fp32, the
BatchNorm's parameters stay fp32 too, whatever the plan says; its kernels take 16-bit inputs beside them (as under
`torch.autocast`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics

from ..common.keyword_options import check_options
from . import masters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # a plan's dtypes by their short names


def resolve(model, plan):
    """Return {path of every module: its dtype, or None where the plan says nothing}.

    Raises as `dtypes_of` does, and ValueError for a pattern that matches no module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    own = {}
    for pattern, dtype in dtypes_of(plan).items():
        matched = [path for path in paths if fnmatchcase(path, str(pattern))]
        if not matched:
            raise ValueError(f"plan[{pattern!r}] matches no module: this model has {', '.join(paths[1:8])} …")
        own.update(dict.fromkeys(matched, dtype))
    found = {}
    for path in paths:  # parents come before their children
        found[path] = own.get(path, found.get(path.rpartition(".")[0]) if path else None)
    return found


def dtypes_of(plan):
    """Return {pattern: torch dtype} of a plan, whose dtypes may also be "fp32", "bf16" and "fp16".

    TypeError for a plan that is not a mapping; ValueError for any other dtype.
    """
    if not hasattr(plan, "items"):
        raise TypeError(f"plan={plan!r}: expected a mapping of patterns to dtypes, {{'blocks.*': torch.bfloat16}}")
    found = {}
    for pattern, dtype in plan.items():
        found[pattern] = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if found[pattern] not in DTYPES.values():
            raise ValueError(f"plan[{pattern!r}]={dtype!r}: expected torch.float32, torch.bfloat16 or torch.float16, "
                             f"or {', '.join(map(repr, DTYPES))}")
    return found


def plan_bytes(model: nn.Module, plan: Mapping[str, Any]) -> int:
    """Return the bytes (int) of the model's parameters under `plan`, each shared one counted once:

        Σ over parameters of numel · itemsize(dtype of the module that owns it)

    Raises as `DynamicPrecisionModel` does.
    """
    dtypes = dict(_dtype_of_parameters(model, resolve(model, plan)).values())
    return sum(p.numel() * dtypes.get(p, p.dtype).itemsize for p in model.parameters())


def _dtype_of_parameters(model, dtypes):
    """Return {id: (parameter, dtype)}. Raises ValueError for a parameter that modules of two dtypes share."""
    found, owners = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(recurse=False):
            if dtypes[path] is None or not p.is_floating_point() or keeps_fp32(path, module, dtypes[path]):
                continue
            owner = f"{path}.{name}".lstrip(".")
            if id(p) in found and found[id(p)][1] is not dtypes[path]:
                raise ValueError(f"{owners[id(p)]} and {owner} are one parameter, and the plan wants it in "
                                 f"{found[id(p)][1]} and in {dtypes[path]}: give both modules the same dtype")
            found[id(p)], owners[id(p)] = (p, dtypes[path]), owner
    return found


def keeps_fp32(path, module, dtype):
    """Tell whether `module` is a BatchNorm, or an InstanceNorm, that keeps running statistics in fp32.

    ValueError for one that keeps them in another type than the plan's `dtype`: no kernel takes the two.
    """
    statistics = getattr(module, "running_mean", None) if isinstance(module, NormWithStatistics) else None
    if statistics is not None and statistics.dtype not in (torch.float32, dtype):
        raise ValueError(f"{path or 'the model'} keeps running statistics in {statistics.dtype}, and the plan wants "
                         f"{dtype}: make the {type(module).__name__} fp32 first (.float()), which takes inputs of any "
                         "dtype")
    return statistics is not None and statistics.dtype is torch.float32


class Applied:
    """Applies a plan to a model: casts its parameters, and adds hooks that cast the inputs of each part.

    `undo()` reverts both. With `keep`, the old values are held. A parameter that was not written to gets them back, to
    the bit; of a trained one, the elements that changed keep their new values. Without `keep` they are freed.
    """

    def __init__(self, model, plan, keep):
        self.dtypes = resolve(model, plan)
        self._handles, self._old = [], []
        try:
            for p, dtype in _dtype_of_parameters(model, self.dtypes).values():
                if p.dtype is not dtype:
                    self._old.append((p, p.dtype, p.data if keep else None))
                    masters.narrow(p, dtype)
            for path, module in model.named_modules():
                self._guard(module, self.dtypes[path], self.dtypes[path.rpartition(".")[0]] if path else None)
        except BaseException:
            self.undo()
            raise

    def _guard(self, module, dtype, around):
        """Add a hook that casts inputs, if the module has parameters or another dtype than the module around it.

        If an input has the dtype already, `Tensor.to` returns it without a copy.
        """
        own = next((p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()), None)
        dtype = dtype or own
        if own is None and dtype is around:  # no weights and no other dtype: nothing to cast
            return
        self._handles.append(module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True))

    def undo(self):
        """Put the model back as it was. Gradients go with their parameters, in the old dtype."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for p, dtype, old in self._old:
            if old is None:
                masters.narrow(p, dtype)
            else:
                masters.sync(old, p)  # what training changed stays, the rest is as it was
                gradient, p.grad = p.grad, None
                p.data, p.grad_dtype = old, dtype
                p.grad = None if gradient is None else gradient.to(dtype)
        self._old.clear()


def _cast_inputs(dtype, module, args, kwargs):
    return cast((args, kwargs), dtype)


def cast(tree, dtype):
    """Cast the floating-point tensors in `tree` (nested lists, tuples, dicts) to `dtype`; float64 stays."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() and tree.dtype.itemsize <= 4 else tree
    if isinstance(tree, dict):
        return type(tree)((name, cast(item, dtype)) for name, item in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(cast(item, dtype) for item in tree))
    return type(tree)(cast(item, dtype) for item in tree) if isinstance(tree, (list, tuple)) else tree


@contextmanager
def precision_context(model: nn.Module, plan: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Run the model in other dtypes inside the context: `with precision_context(model, {"blocks.*": torch.bfloat16}):`.

    `plan`: as in DynamicPrecisionModel, or one dtype for the whole model. Yields the model. Afterwards, also after an
    exception, the model has the same parameters in their old dtypes, with the same values to the bit where nobody wrote
    to them, and no hook is left. The old values are held meanwhile, so this saves no bytes: the cast parameters come on
    top. To save bytes, use DynamicPrecisionModel.

    Raises TypeError for a plan that is not a mapping. Raises ValueError for a dtype other than float32, bfloat16 and
    float16, a pattern that matches no module, a parameter that parts of two dtypes share, and a BatchNorm whose
    statistics are in a 16-bit type other than the plan's.
    """
    applied = Applied(model, {"*": plan} if isinstance(plan, (torch.dtype, str)) else plan, keep=True)
    try:
        yield model
    finally:
        applied.undo()


class DynamicPrecisionModel(nn.Module):
    """Give each submodule of a model its own dtype, which may change as the model trains.

        DynamicPrecisionModel(model, {"*": torch.bfloat16, "*norm*": torch.float32, "head": torch.float32})

    A plan maps patterns to torch.float32, torch.bfloat16 or torch.float16, or to their short names "fp32", "bf16" and
    "fp16". A pattern is matched with the whole path of every module (`model.named_modules()`; the model itself is
    `""`), and case counts. `*` stands for any text, dots and none included, `?` for one character, `[01]` for one of
    these; `"*"` is every module. So `"blocks.*"` is all that is inside `blocks`, and `"blocks"` is that module.

    - Where several patterns match a module, the last of them in the mapping counts: write the general ones first.
    - A module that no pattern matches has the dtype of the module around it. Where none matches any module around it,
      it stays as it is. So `{"blocks.0": torch.bfloat16}` is the whole first block.
    - A pattern that matches no module is an error.
    - Floating-point inputs of a part (not float64) are cast to its dtype; its outputs are cast where the next part
      wants another. A BatchNorm with fp32 statistics keeps fp32 parameters, and takes inputs in the plan's dtype.

    Its parameters take `plan_bytes(model, plan)`. Call it as the model itself, and make the optimizer after it.
    `.plan = {…}` puts another plan in force; `.plan` reads as torch dtypes. `restore()` returns the model in the dtypes
    that it had, and so does the end of `with DynamicPrecisionModel(model, plan) as m:`. Values that were rounded stay
    rounded, unless `keep=True` holds the old ones (and their bytes). Raises as `precision_context` does, and TypeError
    for an unknown option.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, Any], *, keep: bool = False, **unknown: Any) -> None:
        super().__init__()
        check_options(unknown, ("model", "plan", "keep"), type(self).__name__)
        self.model, self.keep = model, keep
        self._applied = Applied(model, plan, keep)
        self._plan = dtypes_of(plan)

    @property
    def plan(self) -> dict[str, torch.dtype] | None:
        """Return the plan in force, pattern → torch dtype; None after `restore()`."""
        return None if self._applied is None else dict(self._plan)

    @plan.setter
    def plan(self, plan):
        _dtype_of_parameters(self.model, resolve(self.model, plan))  # raises before anything changes
        self.restore()
        self._applied = Applied(self.model, plan, self.keep)
        self._plan = dtypes_of(plan)

    def restore(self) -> nn.Module:
        """Take casts and hooks away and return the model. Calling it again does nothing."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
