"""How an operation writes into memory that is given: by its `out=`, if that is a kernel of its own.

Many operations have an `out=` that computes into memory of its own and copies. PyTorch generates these, and registers
them for all devices at once (CompositeExplicitAutograd); one with a kernel for the device itself writes where it is
told. A few others are written here by means of operations in place, with the same kernels.
"""

import functools

import torch

aten = torch.ops.aten


@functools.cache
def out_variant(func, device_type):
    """Return (operation, names of its out= arguments) that computes `func` into given memory on a device, or None."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func._overloadpacket.overloads():
        other = getattr(func._overloadpacket, name)
        outs = [each.name for each in other._schema.arguments if each.is_out and str(each.type) == "Tensor"]
        inputs = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if outs and inputs == wanted and torch._C._dispatch_has_kernel_for_dispatch_key(
                other.name(), device_type.upper()):
            return other, outs
    return None


def writes_directly(func, device_type):
    """Tell whether `write` computes `func` in the memory that is given, without a copy."""
    return func in _IN_PLACE or out_variant(func, device_type) is not None


def write(func, args, kwargs, outs):
    """Compute `func(*args, **kwargs)` into the tensors `outs`, in the order of what it returns (None for none).

    Returns the bytes of memory that stood besides meanwhile: 0 for an operation that `writes_directly`.
    """
    if func in _IN_PLACE:
        _IN_PLACE[func](outs[0], *args, **kwargs)
        return 0
    variant = out_variant(func, next(out for out in outs if out is not None).device.type)
    if variant is not None and None not in outs:
        other, names = variant
        other(*args, **kwargs, **dict(zip(names, outs, strict=True)))
        return 0
    found = func(*args, **kwargs)
    found = found if isinstance(found, (tuple, list)) else [found]
    for out, each in zip(outs, found, strict=True):
        if out is not None:
            out.copy_(each)
    return sum(each.untyped_storage().nbytes() for each in found if isinstance(each, torch.Tensor))


def _copy(out, source, *args, **kwargs):
    out.copy_(source)


def _masked_fill(out, source, mask, value):
    out.copy_(source.expand(out.shape)).masked_fill_(mask, value)


def _fill(value):
    return lambda out, *args, **kwargs: out.fill_(value)


def _nothing(out, *args, **kwargs):
    pass


def _embedding(out, weight, indices, *args, **kwargs):
    torch.index_select(weight, 0, indices.reshape(-1), out=out.view(-1, weight.shape[1]))


_IN_PLACE = {
    aten.clone.default: _copy, aten._to_copy.default: _copy,
    aten.masked_fill.Scalar: _masked_fill, aten.masked_fill.Tensor: _masked_fill,
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), _fill(0)),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), _fill(1)),
    **dict.fromkeys((aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default,
                     aten.empty_strided.default, aten.new_empty_strided.default), _nothing),
    aten.full.default: lambda out, size, value, **kwargs: out.fill_(value),
    aten.full_like.default: lambda out, like, value, **kwargs: out.fill_(value),
    aten.embedding.default: _embedding,
}
