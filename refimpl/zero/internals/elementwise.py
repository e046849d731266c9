"""Finds out whether an optimizer treats each element by itself, by trying it.

A rank has flat pieces of tensors, a bucket at a time. Adam updates an element by that element's gradients alone, and
gives the same numbers on pieces. Adafactor and Muon look at rows and columns, LAMB and LARS at a tensor's norm, others
at the norm of everything: pieces would train another model, without a word. Nobody can list them all. So the optimizer
makes three steps on small tensors, whole, and on the same tensors in the shards of three ranks, as in training.

Optimizers that quantise their states do so in blocks, of tensors that are large enough and fill them: torchao's from
4,096 elements on, in blocks of 128, 256 or 2,048. So one of the tensors fills such blocks, and no shard of it does.
What an optimizer keeps of a piece has to be of the piece's size, or one number: else it could not be saved.

The bound: in fp64 all elementwise optimizers of torch, timm and transformers agree to the bit. A kernel that computes
the last elements of a tensor otherwise than those before would differ by 1e-15 of an update, one that computes in fp32
by 1e-7. All that look at other elements differ by 2e-3 and more of the largest update. 1e-5 is far from either.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...phantom.status import running
from ...saving.optimizer_state import kind_of
from ...side_effects import no_side_effects
from ..bucket import buckets_of
from ..update import ShardedUpdate

RANKS, STEPS = 3, 3
SIZES = (131, 129), (33, 17, 3, 2), (7, 5, 3, 2)  # some optimizers look at rows and columns of 128 and more alone
BLOCKS = {1: (8192,), 2: (128, 128)}, (32, 16, 16)  # by dimensions, and of more: blocks of up to 2,048 elements
BOUND = 1e-5  # of a tensor's largest update
LEAST_LR = 1e-6  # at a lower one (0 before a warmup) the update would drown in rounding


def check_elementwise(optimizer, groups, named):
    """Raise TypeError if what `optimizer` makes does not treat each element by itself, in some param group and for some
    number of dimensions that occurs there. Arguments as of an engine; `named`: what is trained.

    Nothing is changed, and no random number is used up. An optimizer that adds noise is refused: pieces get another
    noise. On a device that computes nothing the trial runs on the CPU; one that cannot run there is not tried.
    """
    device, given, name = named[0][1].device, kinds_of_groups(groups, named), name_of(optimizer)
    elsewhere = computes_nothing(named)  # no values to compare there: then the trial runs on the CPU
    for dtype in (torch.float64, torch.float32):  # not every kernel takes fp64
        with no_side_effects():
            trial = _Trial(optimizer, given, "cpu" if elsewhere else device, dtype)
            try:
                whole = trial.whole()
            except Exception as error:
                reason = error
                continue
            try:
                differ = trial.differ(whole, trial.in_pieces())
                said = "updates an element by others of its tensor or of other tensors" if differ else trial.wrong
            except Exception as error:
                said = f"raises {type(error).__name__} on pieces of tensors ({error})"
        if said:
            raise TypeError(f"{name} {said}, and a rank has flat pieces: use it at stage 0 (DataParallel), or one that "
                            "treats each element by itself, such as AdamW")
        return
    if not elsewhere:
        raise TypeError(f"{name} was tried on small tensors and raised {type(reason).__name__} ({reason}): expected an "
                        "optimizer whose step() takes dense gradients and no closure, such as AdamW") from reason


def computes_nothing(named):
    """Tell whether the model's device has no values: in a dry run, or on a device without kernels."""
    return named[0][1].device.type == "meta" or isinstance(named[0][1], FakeTensor) or running()


def name_of(optimizer):
    """Return the name of what makes an optimizer."""
    return getattr(getattr(optimizer, "func", optimizer), "__name__", type(optimizer).__name__)


def kinds_of_groups(groups, named):
    """Return [(number of a param group, its options, {number of dimensions: name of a parameter})]: groups that differ
    in floats alone, which are not 0, are one."""
    given = [{"params": [p for _, p in named]}] if groups is None else groups(named)
    kinds, names = {}, {p: name for name, p in named}
    for number, group in enumerate(given):
        options = {key: value for key, value in group.items() if key != "params"}
        kind = repr(sorted((key, _kind(value)) for key, value in options.items()))
        dims = kinds.setdefault(kind, (number, options, {}))[-1]
        for p in group["params"]:
            dims.setdefault(p.dim(), names[p])
    return list(kinds.values())


def _kind(value):
    """Return what of a hyper-parameter may decide how a step is computed."""
    if isinstance(value, (list, tuple)):
        return str(list(map(_kind, value)))
    if isinstance(value, float):
        return str(value != 0)
    return "tensor" if torch.is_tensor(value) else repr(value)


class _Trial:
    """Tensors with gradients for some steps, and the optimizer on them."""

    def __init__(self, optimizer, kinds, device, dtype):
        self.make, generator = optimizer, torch.Generator().manual_seed(0)
        self.groups, self.start, self.gradients, self.wrong = [], [], [], None
        for _, options, dims in kinds:
            shapes = [(*sizes, *[1] * dim)[:dim] for dim in sorted(dims)
                      for sizes in (*SIZES[dim > 2 :][:2], *([BLOCKS[0].get(dim, BLOCKS[1])] if dim else []))]
            self.groups.append((options, range(len(self.start), len(self.start) + len(shapes))))
            for shape in shapes:
                self.start.append(uneven(shape, generator).to(device, dtype))
                gradients = [_across(self.start[-1].cpu(), uneven(shape, generator)),
                             *(uneven(shape, generator) for _ in range(1, STEPS))]
                self.gradients.append([each.to(device, dtype) for each in gradients])

    def _optimizer(self, groups):
        made = self.make(groups)
        for group in made.param_groups:
            raise_lr(group)
        return made

    def _groups_of(self, parameters):
        return [{**options, "params": [parameters[i] for i in places]} for options, places in self.groups]

    def whole(self):
        """Return the tensors after all steps of one optimizer."""
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in self.start]
        optimizer = self._optimizer(self._groups_of(parameters))
        for step in range(STEPS):
            for parameter, gradients in zip(parameters, self.gradients, strict=True):
                parameter.grad = gradients[step].clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def in_pieces(self):
        """Return the same, of an optimizer on each rank's shards."""
        parameters = [torch.nn.Parameter(tensor) for tensor in self.start]
        named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
        buckets, found = buckets_of(named, RANKS, 0), {}  # each tensor is cut
        full = {bucket: self._flat(bucket, self.start) for bucket in buckets}
        gradients = [{bucket: self._flat(bucket, [each[step] for each in self.gradients]) for bucket in buckets}
                     for step in range(STEPS)]
        for rank in range(RANKS):
            shards = {bucket: bucket.shard(full[bucket], rank) for bucket in buckets}
            update = ShardedUpdate(buckets, shards, rank, self._optimizer,
                                   lambda named: self._groups_of([p for _, p in named]), named)
            for step in range(STEPS):
                for bucket in buckets:
                    update.add_gradients(bucket, bucket.shard(gradients[step][bucket], rank))
                update.step(set(parameters), lambda bucket: None)
            self.wrong = self.wrong or _kept_otherwise(update)
        for bucket in buckets:
            found |= {slot.name: view for slot, view in zip(bucket.slots, bucket.views(full[bucket]), strict=True)}
        return [found[name] for name, _ in named]

    @staticmethod
    def _flat(bucket, tensors):
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            view.copy_(tensors[int(slot.name)])
        return flat

    def differ(self, whole, pieces):
        """Tell whether one of the tensors is not the same, but for rounding."""
        return not all(bool(difference(*each) <= BOUND) for each in zip(self.start, whole, pieces, strict=True))


def difference(start, whole, pieces):
    """Return the largest difference of two updates, over the largest update; what p itself is rounded by is none."""
    rounding = 8 * torch.finfo(start.dtype).eps * start.abs()
    apart = ((whole - pieces).abs() - rounding).clamp(min=0).max()
    return apart / (whole - start).abs().max().clamp(min=torch.finfo(start.dtype).tiny)


def _kept_otherwise(update):
    """Return words on the first state of a piece that could not be saved or cut in another way; None if all can."""
    try:
        for pairs in update.pieces.values():
            for _, own in pairs:
                for key, value in update.optimizer.state.get(own, {}).items():
                    kind_of(key, value, own.shape, "a piece")
    except TypeError as error:
        return f"cannot be saved, stored or loaded on other ranks ({error})"


def raise_lr(group):
    """Give a param group a learning rate at which an update can be seen."""
    if isinstance(lr := group.get("lr"), (int, float, torch.Tensor)) and lr < LEAST_LR:
        group["lr"] = lr * 0 + 1e-3  # a tensor stays a tensor


def uneven(shape, generator):
    """Return random numbers of other magnitudes in each row and column."""
    numbers = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64)
    for dim, size in enumerate(shape):
        by_row = 10 ** torch.linspace(-1.5, 1, size, device="cpu", dtype=torch.float64)
        numbers *= by_row.view(-1, *[1] * (len(shape) - dim - 1))
    return numbers


def _across(tensor, gradient):
    """Return the gradient without its part along the tensor in each row, as that of a weight before a norm is: some
    optimizers look for it."""
    if not tensor.dim():
        return gradient
    rows, tensor = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.view(1, -1), tensor.double()
    along = tensor.reshape(rows.shape)
    return (rows - along * (rows * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)).view(tensor.shape)
