"""Weights and their fp32 masters: how masters are made, compared and rounded, and how gradients reach them in
buckets."""

from collections import defaultdict
from collections.abc import Iterable

import torch


def check(parameters):
    """Raise ValueError unless each parameter can be 16-bit: floating point, at most fp32, in memory of its own."""
    seen = {}
    for index, p in enumerate(parameters):
        if not p.is_floating_point() or p.dtype.itemsize > 4:
            raise ValueError(f"parameter {index} of shape {tuple(p.shape)} is {p.dtype}: expected float32, bfloat16 or "
                             "float16, which an fp32 master can hold")
        key = p.untyped_storage()._cdata
        if key in seen:
            raise ValueError(f"parameters {seen[key]} and {index} are two tensors in one memory, which making them low "
                             "would pull apart: tie weights by using one Parameter twice")
        seen[key] = index


@torch.no_grad()
def master_of(parameter):
    """Return an fp32 copy of a parameter, a leaf of its own."""
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()


@torch.no_grad()
def narrow(parameter, dtype, fp32_gradient=False):
    """Make a parameter `dtype` in place, and its gradient `dtype` or fp32."""
    gradient, parameter.grad = parameter.grad, None  # grad_dtype may not change beside a gradient
    parameter.data = parameter.data.to(dtype)
    parameter.grad_dtype = torch.float32 if fp32_gradient else dtype
    parameter.grad = None if gradient is None else gradient.to(parameter.grad_dtype)


def check_place(parameter, master, dtype):
    """Raise ValueError if the parameter was converted or moved since it was made `dtype`."""
    if parameter.dtype is not dtype:
        raise ValueError(f"a weight of shape {tuple(parameter.shape)} is {parameter.dtype}, and was made {dtype}: "
                         "convert the model before it is wrapped, and not after")
    if parameter.device != master.device:
        raise ValueError(f"a weight of shape {tuple(parameter.shape)} is on {parameter.device}, its master on "
                         f"{master.device}: move the model before its optimizer is wrapped")


@torch.no_grad()
def sync(master, parameter):
    """Set the elements of the master that do not round to its weight to the weight."""
    # the others keep their low bits
    master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(master.dtype)))


@torch.no_grad()
def round_into(sources, targets):
    """Copy each source into its target, which may be lower."""
    if sources:
        torch._foreach_copy_([t.detach() for t in targets], [s.detach() for s in sources])


@torch.no_grad()
def give_gradients(parameters, masters, factor):
    """Give each master its parameter's gradient, in fp32, times `factor` (a number, or a tensor of one).

    A gradient that is fp32 already is multiplied in place and lent, not copied.
    """
    dense = defaultdict(list)
    for p in parameters:
        masters[p].grad = gradient = p.grad.to(torch.float32)
        if gradient.is_sparse:
            gradient._values().mul_(factor)
        else:
            dense[gradient.device].append(gradient)
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return
    for device, gradients in dense.items():
        torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


@torch.no_grad()
def norm(gradients):
    """Return √ Σ g² over all gradients, added up in fp32, on the first one's device."""
    by_device = defaultdict(list)
    for gradient in gradients:
        values = gradient.coalesce()._values() if gradient.is_sparse else gradient
        by_device[values.device].append(values)
    first = gradients[0].device
    norms = [each.to(first) for values in by_device.values()
             for each in torch._foreach_norm(values, 2, torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms))


def step_bytes(sizes: Iterable[int], bucket_bytes: int = 2**25) -> int:
    """Predict the bytes (int) of fp32 copies of 16-bit gradients during a step: the largest bucket's.

        max over buckets of Σ 4·n,   each Σ ≤ bucket_bytes, or one parameter alone

    `sizes`: the elements n of each parameter, in the optimizer's order. `bucket_bytes=None`: one bucket, 4Ψ. ValueError
    for other `bucket_bytes` that are not above 0.
    """
    check_bucket_bytes(bucket_bytes)
    return max((sum(bucket) for bucket in buckets([4 * n for n in sizes], bucket_bytes)), default=0)


def check_bucket_bytes(bucket_bytes):
    """Raise ValueError unless `bucket_bytes` is None or a number above 0."""
    if bucket_bytes is not None and not (isinstance(bucket_bytes, (int, float)) and bucket_bytes > 0):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected bytes above 0, or None for all at once")


def buckets(items, limit, nbytes=lambda item: item):
    """Yield `items` in order, in lists of at most `limit` bytes together; a larger item is a list of its own."""
    bucket, held = [], 0
    for item in items:
        if bucket and limit is not None and held + nbytes(item) > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += nbytes(item)
    if bucket:
        yield bucket
