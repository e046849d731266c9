"""Reduces compressed buckets over the ranks: the communication hook that an engine of `refimpl.zero` takes.

    payloads can be added (random)     all_reduce of one payload         2(N−1)/N · p     reduce_scatter   (N−1)/N · p
    they cannot                        all_gather of N payloads           (N−1) · p       all_to_all       (N−1)/N · p
    powersgd                           all_reduce of P, then of Q        2(N−1)/N · p     (not a shard)

p are the bytes of a bucket's payload; for a shard, all N chunks of a bucket are compressed each by itself, and p is the
sum. All ranks add up the same payloads in the same order, so they get the same average, to the bit.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.handle import Then
from .powersgd import FactorLayout

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


def finite_or(x, before):
    """Return x if all of it is finite, else `before`. It does not wait for the device."""
    return torch.where(x.sum().isfinite(), x, before)  # `if` would wait for the device


class Reductions:
    """Sends the payloads of a GradientCompressor, over the communicator and for the buckets that `attach` was given."""

    @property
    def reduces_shards(self) -> bool:
        """Tell whether a rank can get its shard of the average without the rest."""
        return self.coder is not None

    @property
    def active(self) -> bool:
        """Tell whether gradients are compressed; not during warm-up."""
        return self.steps >= self.warmup

    def attach(self, comm: "Communicator", layouts: Any) -> None:
        """Set the ranks, and `numel`, `dtype`, `device` and `slots`, [(first, shape)], of each bucket. RuntimeError for
        a second engine: residuals belong to one model."""
        if self.comm is not None:
            raise RuntimeError(f"{self!r} is another engine's hook already: make one for each engine")
        self.comm, self.layouts = comm, layouts

    def all_reduce(self, key: object, flat: torch.Tensor, dtype: torch.dtype, label: str) -> Any:
        """Launch the average of bucket `key`, flat (n,), with numbers on the wire in `dtype`. The handle's `wait()`
        returns it, (n,) in `dtype`."""
        x = self.compensated(key, flat, label)
        if self.coder is None:
            return self._by_factors(key, x, dtype, label)
        seed = self.seed_of(key)
        payload = self.coder.encode(x, dtype, seed)
        self.coder.add(sent := torch.zeros_like(x), payload, dtype, seed)
        self.keep_residual(key, x, sent)
        send = self.comm.all_reduce if self.coder.summed else self.comm.all_gather
        like = sent.zero_()  # what was sent is subtracted by now: its memory takes the average

        def average(got):
            return self._average(got.view(1 if self.coder.summed else self.comm.world_size, -1), like, dtype, seed)

        return Then(send(payload, async_op=True, label=label), average)

    def reduce_scatter(self, key: object, flat: torch.Tensor, dtype: torch.dtype, label: str) -> Any:
        """Launch the reduction of bucket `key` to shards. The handle's `wait()` returns this rank's shard of the
        average, (n/N,) in `dtype`."""
        if self.coder is None:
            def own(whole):
                return whole.chunk(self.comm.world_size)[self.comm.rank].clone()  # a view would keep the whole

            return Then(self.all_reduce(key, flat, dtype, label), own)
        x = self.compensated(key, flat, label)
        sent, seeds = torch.zeros_like(x), [self.seed_of(key, chunk) for chunk in range(self.comm.world_size)]
        payloads = []
        for chunk, out, seed in zip(x.chunk(len(seeds)), sent.chunk(len(seeds)), seeds, strict=True):
            payloads.append(self.coder.encode(chunk, dtype, seed))
            self.coder.add(out, payloads[-1], dtype, seed)
        self.keep_residual(key, x, sent)
        send = self.comm.reduce_scatter if self.coder.summed else self.comm.all_to_all

        def average(got):
            like = torch.zeros(flat.numel() // len(seeds), dtype=x.dtype, device=x.device)
            return self._average(got.view(1 if self.coder.summed else len(seeds), -1), like, dtype,
                                 seeds[self.comm.rank])

        return Then(send(torch.cat(payloads), async_op=True, label=label), average)

    def _average(self, payloads, total, dtype, seed):
        """Add up payloads in `total`, zeros; return the average over ranks."""
        for payload in payloads:
            self.coder.add(total, payload, dtype, seed)
        return (total / self.comm.world_size).to(dtype)

    def _by_factors(self, key, x, dtype, label):
        """Launch powersgd's first all_reduce; the second is called when that is waited for, on all ranks at the same
        place of their programs."""
        slots, N = self.layouts[key].slots, self.comm.world_size
        layout = FactorLayout([shape for _, shape in slots], self.ratio, self.rank)

        def views(flat):
            return [flat[first : first + shape.numel()].view(shape) for first, shape in slots]

        def average(first):
            whole, p = first.to(x.dtype).split([layout.whole_numel, sum(layout.p_sizes)])
            q = self.comm.all_reduce(layout.second_payload(views(x), p).to(dtype), label=label).to(x.dtype).div_(N)
            result = torch.zeros_like(x)
            layout.write_average(views(result), whole / N, p, q)
            self._keep_factors(key, layout, views, x, result, finite_or(q, before))
            return result.to(dtype)

        first = layout.first_payload(views(x), before := self.factors(key, layout, x))
        return Then(self.comm.all_reduce(first.to(dtype), async_op=True, label=label), average)

    def _keep_factors(self, key, layout, views, x, average, q):
        """Keep what the factors leave of matrices; of tensors that were sent whole nothing is left."""
        sent, mine = average.clone(), views(x)
        for number, _ in layout.whole:
            views(sent)[number].copy_(mine[number])
        self.keep_residual(key, x, sent, q)

    # --- saved and loaded with the engine ----------------------------------------------------------------------------

    @property
    def about(self) -> str:
        """Return a sentence that has to be the same where the state is loaded."""
        return f"{self!r} of {self.comm.world_size} ranks"

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return {name: tensor} of what this rank keeps, always of the same names and shapes."""
        found = {"steps": torch.tensor([self.steps])}
        for key, layout in enumerate(self.layouts):
            kept, wide = self.kept.get(key, {}), torch.promote_types(layout.dtype, torch.float32)
            sizes = {"residual": layout.numel} if self.error_feedback else {}
            if self.coder is None:
                sizes["q"] = sum(FactorLayout([shape for _, shape in layout.slots], self.ratio, self.rank).q_sizes)
            found |= {f"{key}/{name}": kept.get(name, torch.zeros(numel, dtype=wide, device=layout.device))
                      for name, numel in sizes.items() if numel}
        return found

    def load_state_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take what `state_tensors` returned. Zeros are what has not begun."""
        self.drop()
        self.steps, self.kept = int(tensors["steps"]), {}
        for name, x in tensors.items():
            if name != "steps" and x.any():
                key, kind = name.split("/")
                self.kept.setdefault(int(key), {})[kind] = x.to(self.layouts[int(key)].device, copy=True)
