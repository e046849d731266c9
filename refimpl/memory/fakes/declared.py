"""What the user declares for lines that need values: the sizes of what they make, and values that decide."""

import itertools
import math

import torch

aten = torch.ops.aten

# Lines of PyTorch's own that a placeholder would lead astray -> the answer: an optimizer that still has a way to go.
_OF_TORCH = {
    ("torch/optim/lbfgs.py", "opt_cond"): False,
    ("torch/optim/lbfgs.py", "gtd > -tolerance_change"): False,
    ("torch/optim/lbfgs.py", "d.mul(t).abs().max() <= tolerance_change"): False,
    ("torch/optim/lbfgs.py", "ys > 1e-10"): True,
    ("torch/optim/lbfgs.py", "float(orig_loss)"): math.inf,
    ("torch/optim/lbfgs.py", "float(loss)"): -math.inf,
}


class Declared:
    """What the user declares, by line, `{"train.py:31": …}`, or by function, `{"moe.py:Experts.forward": …}`. A list is
    given in turn, over and over."""

    def __init__(self, sizes=None, values=None):
        self._sizes, self._values = _by_line("sizes", sizes or {}), _by_line("values", values or {})

    def value(self, place, places, otherwise):
        """Return the value declared for `place`, or for one of the lines of PyTorch's that run, or `otherwise()`."""
        value = _at(place, self._values)
        if value is not None:
            return value
        for at in places:
            for (path, words), answer in _OF_TORCH.items():
                if at.path.endswith(path) and words in at.expression:
                    return answer
        return otherwise()

    def has_value(self, place):
        """Tell whether a value is declared for `place`."""
        return any(place.matches(line) for line in self._values)

    def size(self, place, tensor):
        """Return the number of elements declared for `place`, of those of `tensor`, or None: a number, a share of them
        or a function of the shape."""
        declared = size = _at(place, self._sizes)
        if callable(size):
            size = size(tuple(tensor.shape))
        if isinstance(size, float):
            size = round(size * tensor.numel())
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError(f"{place}: the size declared for it is {declared!r}: expected a number of elements, a "
                             "share of them (0.25, 1.0), a function of the shape that returns one, or a list of these")
        return size


def _by_line(name, declared):
    for line in declared:
        at = line.rpartition(":") if isinstance(line, str) else ("", "", "")
        if not at[0] or not at[2].isdigit() and not at[2].replace(".", "").isidentifier():
            raise ValueError(f"{name}={{{line!r}: …}}: expected a line, e.g. 'train.py:31', or a function, e.g. "
                             "'train.py:Experts.forward'")
    return {line: itertools.cycle(what) if isinstance(what, (list, tuple)) else what
            for line, what in declared.items()}


def _at(place, declared):
    what = next((what for line, what in declared.items() if place.matches(line)), None)
    return next(what) if isinstance(what, itertools.cycle) else what  # in turn, over and over


def made_in_size(mode, declared, place, func, args, kwargs, error):
    """Return what `func` makes, in the size declared for `place`; ValueError if there is none."""
    tensor = args[1] if func in (aten.masked_select.default, aten._ctc_loss.Tensor) else args[0]
    make = _MAKE.get(func)
    if make is None:
        raise ValueError(f"{place}: `{place.expression}` makes a tensor whose shape depends on values ({func}), and "
                         "tensors have none in a dry run: leave it out of the step, or track a real run") from error
    size = declared.size(place, tensor)
    if size is None:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        raise ValueError(
            f"{place}: `{place.expression}` makes a tensor whose shape depends on the values of a {kind} "
            f"({func.overloadpacket.__name__}), and tensors have none in a dry run. Declare how many elements it "
            f"finds: memory.dry_run(…, sizes={{{str(place)!r}: 8}}), or a share (0.25), or a function of that shape"
        ) from error
    with mode:
        return make(size, *args, **kwargs)


def _unique(size, tensor, dim, inverse, counts):
    """Return the elements (or slices along `dim`), where each went, and how often it was there."""
    shape = [size] if dim is None else [size if i == dim % tensor.ndim else n for i, n in enumerate(tensor.shape)]
    places = [0] if not inverse else list(tensor.shape) if dim is None else [tensor.shape[dim]]
    return (tensor.new_empty(shape), tensor.new_empty(places, dtype=torch.int64),
            tensor.new_empty([size] if counts else [0], dtype=torch.int64))


def _ctc_loss(longest, log_probs, *args):  # (T, N, C) -> (N,), (N, T, 2 · the longest target + 1)
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * longest + 1)


_MAKE = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten.nonzero.default: lambda n, x: x.new_empty_strided((n, x.ndim), (1, n), dtype=torch.int64),
    aten.masked_select.default: lambda n, x, mask: x.new_empty(n),
    aten.repeat_interleave.Tensor: lambda n, repeats, output_size=None: repeats.new_empty(n, dtype=torch.int64),
    aten.bincount.default: lambda n, x, weights=None, minlength=0: x.new_empty(
        max(n, minlength), dtype=torch.int64 if weights is None else torch.float64),
    aten._unique2.default: lambda n, x, sorted=True, inverse=False, counts=False, **names: _unique(
        n, x, None, names.get("return_inverse", inverse), names.get("return_counts", counts)),
    aten.unique_dim.default: lambda n, x, dim, sorted=True, inverse=False, counts=False, **names: _unique(
        n, x, dim, names.get("return_inverse", inverse), names.get("return_counts", counts)),
    aten.unique_consecutive.default: lambda n, x, inverse=False, counts=False, dim=None, **names: _unique(
        n, x, names.get("dim", dim), names.get("return_inverse", inverse), names.get("return_counts", counts)),
}
