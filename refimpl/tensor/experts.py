"""Parameters that a module with a forward of its own reads, split in place: the weights of all experts in one tensor.

    gate and up of E experts   (E, 2·I, C)    rank r has rows r·I/N … of gate and as many of up      "packed column"
    down                       (E, C, I)      and the columns for these features                     "row"
    attention's sinks          (H,)           those of this rank's heads                             "column"

Experts read the same x on all ranks, and each rank's output is a part of the sum: `enter` before them, `leave` behind
(`conjugate`). The routing weights that they multiply with are an input, too, so the gradients of both are summed.
"""

import torch
from torch import nn

from ..sharding import ShardSpec, set_spec
from .conjugate import enter, leave
from .vocabulary import part

CUTS = {"column": (-2, 1), "row": (-1, 1), "packed column": (-2, 2), "packed row": (-1, 2)}  # dim, parts in it


def split_parameter(model, comm, name, style):
    """Put this rank's block in a parameter's place. ValueError for sizes that cannot be shared out."""
    owner, _, leaf = name.rpartition(".")
    whole, (dim, n) = model.get_parameter(name), cut_of(model, comm, name, style)
    size = whole.shape[dim] // n
    begin, end = part(size, comm, name)
    offsets, lengths = [0] * whole.dim(), [*whole.shape]
    offsets[dim], lengths[dim] = begin, n * (end - begin)
    spec = ShardSpec(name, tuple(whole.shape), tuple(offsets), tuple(lengths), fused=(dim, n) if n > 1 else ())
    block = nn.Parameter(spec.block(whole.detach()).clone(memory_format=torch.contiguous_format), whole.requires_grad)
    set_spec(block, spec, (name,), block.numel() // (end - begin) * -(-size // comm.world_size))
    setattr(model.get_submodule(owner), leaf, block)


def cut_of(model, comm, name, style):
    """Return (dim, how many equal parts are side by side in it) of a parameter that a style cuts. ValueError if it
    cannot."""
    whole = model.get_parameter(name)
    if style not in CUTS:
        raise ValueError(f"{name} is a parameter: expected a style of {', '.join(CUTS)}, and not {style!r}")
    dim, n = CUTS[style]
    dim = max(dim + whole.dim(), 0)  # a vector, as attention's sinks, has one dim to cut
    if whole.shape[dim] % n:
        raise ValueError(f"{name}: {whole.shape[dim]} features in {n} equal parts: expected a multiple of {n}")
    part(whole.shape[dim] // n, comm, name)
    return dim, n


def split_experts(module, comm):
    """Let a module compute a part of a sum: its inputs are the same on all ranks, and its output is summed."""
    module.register_forward_pre_hook(lambda module, args, kwargs: (
        tuple(_entered(x, comm) for x in args), {name: _entered(x, comm) for name, x in kwargs.items()}),
        with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: leave(output, comm))


def _entered(x, comm):
    # Tensors of ids and masks have no gradient to sum.
    return enter(x, comm) if isinstance(x, torch.Tensor) and x.requires_grad else x


def split_shared_key(module, comm, rotated):
    """Sum over ranks the gradient of a whole layer's last `rotated` features: the key that all heads of multi-head
    latent attention share, of which each rank has some. The features before them go to a layer by columns, which sums
    their gradient itself."""
    def after(module, args, output):
        y, key = output.split((output.shape[-1] - rotated, rotated), -1)
        return torch.cat((y, enter(key, comm)), -1)

    module.register_forward_hook(after)
