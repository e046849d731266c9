"""AdamW where the states rest: in host memory. Gradients come there, 16-bit weights go back, states do not move.

    backward   gradients → host         each bucket as soon as it is reduced, while backward goes on
    step       AdamW on the host, tile by tile; the weights of one tile → device, while the next one is computed

With states on the device an update moves 28 bytes a parameter through device memory; here 2 + 2 bytes a parameter cross
the link, and device memory is without masters, moments and gradients, 14 of 16 bytes. `ratio` keeps a part of the
states on the device, which updates it at the same time. "ZeRO-Offload" (Ren et al. 2021), sections 4 and 5;
"ZeRO-Offload++" (DeepSpeed 2023) has the ratio.
"""

import contextlib
import itertools
from numbers import Real
from typing import Any

import torch

from ..optimizer_subset import snapshot_groups, step_subset
from .adamw_kernels import Hyper, kernel_of
from .host_link import HostLink
from .host_part import HostPart
from .tiled_update import merged, update_tiles

SUB_GROUP_SIZE = 2**23  # elements: 16 MB of 16-bit weights; a tile's update takes about 5 ms, its copy 0.5 to 1


class CPUAdam:
    """An update for an engine of refimpl.zero: `Zero2(model, comm, partial(torch.optim.AdamW, lr=1e-3),
    update=CPUAdam())`.

    The engine's optimizer says what is computed: torch's AdamW, or Adam without weight decay, with its param groups and
    hyper-parameters; it is saved and loaded as without offload. Weights are those of torch's fused AdamW.

    - `ratio`: the share of the elements whose states are in host memory; those of the others stay on the device.
    - `sub_group_size`: elements of a tile.
    - `kernel`: "torch", "c++" (RuntimeError without a compiler), or "auto": "c++" where a compiler is. What was taken,
      and why, is `engine.update.kernel.name` and `engine.update.reason`.
    - `threads`: of the kernel; None for torch's number, "auto" for the quickest.
    - `rate`: on a CPU, a `comm.Link`: copies take as long as over a link of that rate, in each direction.

    With a `store` states stay in host memory, unless the store says `below_host`: it then takes them further down.
    ValueError for a ratio outside 0 to 1 and other values that cannot be; TypeError for another optimizer.
    """

    def __init__(self, *, ratio: float = 1.0, sub_group_size: int = SUB_GROUP_SIZE, kernel: str = "auto",
                 threads: int | None = None, rate: Any = None) -> None:
        if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: expected a number from 0 to 1, the share of the elements whose states "
                             "are in host memory")
        if type(sub_group_size) is not int or sub_group_size < 1:
            raise ValueError(f"sub_group_size={sub_group_size!r}: expected an integer of at least 1, the elements of a "
                             "tile")
        self.ratio, self.sub_group_size, self.rate = ratio, sub_group_size, rate
        self.kernel, self.reason = (kernel, "") if hasattr(kernel, "update") else kernel_of(kernel, threads)

    def __call__(self, buckets: Any, shards: Any, rank: int, optimizer: Any, groups: Any, named: Any,
                 stored: Any = None) -> "HostUpdate":
        """Return the update of one engine, a HostUpdate."""
        return HostUpdate(self, buckets, shards, rank, optimizer, groups, named, stored)

    def __repr__(self):
        return (f"CPUAdam(ratio={self.ratio}, sub_group_size={self.sub_group_size}, kernel={self.kernel.name}"
                f"{f' ({self.reason})' if self.reason else ''}, threads={getattr(self.kernel, 'threads', None)})")


class HostUpdate:
    """What an engine asks of its update (`refimpl.zero.update` says what each method is for), on the host.

    `masters[bucket]`: the HostPart, which has the masters in both memories. `link.moved`: bytes copied, by direction.
    """

    def __init__(self, options, buckets, shards, rank, optimizer, groups, named, stored):
        self.kernel, self.reason, self.shards, self.stored = options.kernel, options.reason, shards, stored
        self.pieces, self.masters, self.optimizer = {}, {}, None
        self._reduced, self._copies, self._now = set(), {}, None  # buckets with gradients; bucket → Copies
        self.below_host = getattr(getattr(stored, "store", None), "below_host", False)
        self.link = HostLink(options.sub_group_size, options.rate, locked=not self.below_host)
        if self.below_host:
            masters, reduced = self.masters, self._reduced
            stored.register("states", lambda bucket: masters[bucket].states() if bucket in masters else [])
            stored.register("gradients", lambda bucket: [masters[bucket].gradient] if bucket in reduced else [])
        for bucket in buckets:
            with self.loaded(bucket):
                part = self.masters[bucket] = HostPart(bucket, shards[bucket], options.ratio, self.link)
                self.pieces[bucket] = [(cut, _own(part.master_of(cut), bucket.dtype)) for piece in bucket.pieces(rank)
                                       for cut in part.cut(piece)]
        self.optimizer = optimizer(self._groups(groups, named))
        check_optimizer(self.optimizer)
        self.optimizer.register_step_post_hook(self._update_tiles)  # after the device's part, before hooks of others

    def _groups(self, groups, named):
        """Return the caller's groups, each parameter replaced by what this rank has of it: one piece, or two."""
        mine = {}
        for pairs in self.pieces.values():
            for piece, own in pairs:
                mine.setdefault(piece.slot.parameter, []).append(own)
        given = [{"params": [p for _, p in named]}] if groups is None else groups(named)
        given, names = [{**group, "params": list(group["params"])} for group in given], {p: name for name, p in named}
        self.group_names = [[names[p] for p in group["params"]] for group in given]
        found = [{**group, "params": [own for p in group["params"] for own in mine.get(p, ())]} for group in given]
        if not any(group["params"] for group in found):  # an optimizer needs a parameter
            found[0]["params"] = [torch.nn.Parameter(torch.zeros(0))]
        return found

    @contextlib.contextmanager
    def loaded(self, bucket, following=None, only=None):
        """Load what the store has of a bucket for the context, and prefetch the next."""
        with contextlib.nullcontext() if self.stored is None else self.stored.loaded(bucket, following, only):
            yield

    # --- gradients ---------------------------------------------------------------------------------------------------

    def add_gradients(self, bucket, shard):
        """Begin to copy a shard of averaged gradients, and add it to those of earlier micro-batches."""
        part, first = self.masters[bucket], bucket not in self._reduced
        with self.loaded(bucket, only="gradients"):
            part.add_gradient(shard, first)
            self._reduced.add(bucket)
            self._set_gradients(bucket)
            if self.below_host:
                part.wait_for_gradients()  # the store may take it to the disk when this context ends

    def _set_gradients(self, bucket):
        for piece, own in self.pieces[bucket]:
            gradient, own.grad = self.masters[bucket].gradient_of(piece), None
            own.grad_dtype, own.grad = gradient.dtype, gradient

    def copy_gradients(self, bucket):
        """Copy the device's part of a shard that is part of a whole buffer, which is about to be freed."""
        if bucket in self._reduced:
            self.masters[bucket].own_gradient()
            self._set_gradients(bucket)

    def with_gradients(self):
        """Yield (bucket, pieces) of all buckets, with their gradients."""
        for bucket, following in itertools.pairwise([*self.pieces, None]):
            with self.loaded(bucket, following, only="gradients"):
                self.masters[bucket].wait_for_gradients()
                yield bucket, self.pieces[bucket]

    def drop_gradients(self, bucket):
        """Drop the gradients of a bucket."""
        if self.below_host:
            self.stored.drop(bucket, "gradients")
        self._reduced.discard(bucket)
        self.masters[bucket].drop_gradient(free=self.below_host)
        for _, own in self.pieces[bucket]:
            own.grad = None

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, used, updated):
        """Update this rank's shard of each bucket, as far as parameters are `used`. `updated(bucket)` then launches the
        all_gather of all shards. The weights of one bucket go to the device while the next one is computed."""
        before = snapshot_groups(self.optimizer)
        handles, last = [], None
        try:
            for bucket, following in itertools.pairwise([*self.pieces, None]):
                with contextlib.ExitStack() as stack:
                    stack.enter_context(self.loaded(bucket, following))
                    self._update(bucket, used, before)
                    held = stack.pop_all()
                last, done = (bucket, held), last  # a bucket behind: its weights travel while the next is computed
                handles += self._publish(done, updated)
                if self.below_host:  # which has room for two buckets: one is loaded while one is updated
                    last, done = None, last
                    handles += self._publish(done, updated)
        finally:
            handles += self._publish(last, updated)
        for handle in filter(None, handles):
            handle.wait()

    def _publish(self, done, updated):
        if done is None:
            return []
        bucket, held = done
        with held:
            for copy in self._copies.pop(bucket, ()):
                copy.wait()
        return [updated(bucket)]

    def _update(self, bucket, used, before):
        """Run the optimizer on one bucket: it updates the device's part, and `_update_tiles` then the host's."""
        check_optimizer(self.optimizer)  # hyper-parameters may have been changed
        part, given = self.masters[bucket], []
        part.wait_for_gradients()
        for number, (piece, own) in enumerate(self.pieces[bucket]):
            gradient = own.grad if piece.slot.parameter in used else None  # no decay where no rank has a gradient
            own.grad = None
            if gradient is not None and part.on_host(piece):
                given.append((number, piece, own, gradient))
            elif gradient is not None:
                own.grad_dtype, own.grad = own.dtype, gradient.to(own.dtype)
        self._now = bucket, given
        try:
            step_subset(self.optimizer, (own for _, own in self.pieces[bucket]), before)
        except BaseException:
            for *_, own, gradient in given:  # so that the step can be tried again
                own.grad_dtype, own.grad = gradient.dtype, gradient
            raise
        finally:
            self._now = None
        part.round_on_device(self.shards[bucket])
        self.drop_gradients(bucket)

    @torch.no_grad()
    def _update_tiles(self, *_):
        """Update the host's part of the bucket whose turn it is, and begin to copy its weights to the device."""
        bucket, given = self._now
        part, runs = self.masters[bucket], []
        group_of = {id(own): group for group in self.optimizer.param_groups for own in group["params"]}
        for number, piece, own, gradient in given:
            if gradient.untyped_storage()._cdata != part.gradient.untyped_storage()._cdata:  # somebody put another one
                part.gradient_of(piece).copy_(gradient)
            state = part.state_of(piece, self.optimizer.state[own])
            state["step"] += 1
            runs.append((number, piece, hyper_of(group_of[id(own)], state["step"])))
        if runs:
            self._copies[bucket] = update_tiles(part, merged(runs), self.shards[bucket], self.kernel, self.link)

    def follow(self, bucket):
        """Take what a module wrote to its parameters from a bucket's shard into its masters."""
        self.masters[bucket].follow(self.shards[bucket])

    def round_master(self, bucket):
        """Round all of a bucket's masters into its shard."""
        self.masters[bucket].round_into(self.shards[bucket])


def _own(held, dtype):
    """Return what is held of a piece, as a Parameter whose gradient may have another dtype."""
    own = torch.nn.Parameter(held)
    if own.dtype != dtype:
        own.grad_dtype = dtype
    return own


def check_optimizer(optimizer):
    """TypeError for an optimizer that is not torch's AdamW or Adam; ValueError for options that are not computed."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):  # a subclass may compute something else
        raise TypeError(f"{type(optimizer).__name__}: CPUAdam computes torch.optim.AdamW. For another optimizer on the "
                        "host: update=functools.partial(refimpl.zero.update.ShardedUpdate, device='cpu')")
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        for name, wrong in (("amsgrad", group["amsgrad"]), ("maximize", group["maximize"]),
                            ("weight_decay", group["weight_decay"] and not decoupled)):
            if wrong:
                raise ValueError(f"{name}={group[name]!r} of {type(optimizer).__name__}: CPUAdam computes AdamW with "
                                 f"{'decoupled' if name == 'weight_decay' else 'no'} {name}")


def hyper_of(group, step):
    """Return the Hyper of a param group at a step."""
    beta1, beta2 = map(float, group["betas"])
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], round(float(step)))
