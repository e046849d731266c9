"""What `together` returns: an engine whose ranks stand in a mesh."""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ..tensor.conjugate import rows_of
from .batch import check_batch

if TYPE_CHECKING:
    from os import PathLike

    from ..mesh import ConnectedMesh
    from ..pipeline.executor import PipelineParallelStage


class ParallelEngine:
    """Trains a model that `together` has split: `train_step`, `clip_grad_norm_`, `step`, `save` and `load`.

    - `mesh`: the connected mesh. `pipe`: the PipelineParallelStage; its `stages` are this rank's.
    - `engine`: the engine of ZeRO that updates this rank's parameters.
    - `attention`: the SequenceParallelAttention, if the mesh has cp. `scaler`: the AdaptiveLossScaler, if the loss is
      scaled: steps whose gradients overflow are skipped, on all ranks.
    """

    def __init__(self, mesh: "ConnectedMesh", pipe: "PipelineParallelStage", engine: Any, attention: Any = None,
                 recomputed: Any = None, scaler: Any = None, sequence: bool = False) -> None:
        self.mesh, self.pipe, self.engine, self.attention, self.recomputed = mesh, pipe, engine, attention, recomputed
        self.scaler, self.sequence = scaler, sequence
        mesh.get_parallel_group("tp", "cp", "pp")  # all ranks make it
        self.data, self.stepped = mesh.get_parallel_group("dp", "cp"), True

    @property
    def model(self) -> torch.nn.Module:
        """Return the module of this rank's layers."""
        return self.engine.model

    @property
    def optimizer(self) -> Any:
        """Return the optimizer of this rank's parts."""
        return self.engine.optimizer

    @property
    def steps(self) -> int:
        """Return how many steps were made, those before a save included."""
        return self.engine._steps

    @property
    def needs(self) -> tuple[bool, bool]:
        """Tell whether this rank needs (tokens, targets): it has the first stage, the last one."""
        return 0 in self.pipe.stages, self.pipe.schedule.stages - 1 in self.pipe.stages

    def train_step(self, tokens: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward of a batch; return its mean loss over all ranks, on all ranks.

        `tokens`, `targets`: the rows of this place on dp, (B, T): the same on all ranks that differ in tp, cp or pp
        alone, those that need them (`needs`). The target of a token is the next token, or −100. Gradients are averaged
        when this returns.
        """
        if not self.stepped:
            raise RuntimeError("train_step after train_step: call step() or zero_grad() first; for a larger batch give "
                               "together(micro_batches=…)")
        check_batch(self.mesh, tokens, targets)
        tokens, targets = self._own(tokens, targets)
        self.stepped = False
        if self.scaler is not None:
            self.scaler.get_scale()  # it knows that gradients are scaled on ranks that compute no loss, too
        with self.engine.collect() if self.mesh.pp > 1 else contextlib.nullcontext():
            loss = self.pipe.train_step(tokens, targets)
        return self._mean(loss)

    def evaluate(self, tokens: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss of a batch over all ranks, on all ranks, without gradients and in eval mode. Arguments
        are `train_step`'s."""
        check_batch(self.mesh, tokens, targets)
        return self._mean(self.pipe.evaluate(*self._own(tokens, targets)))

    def _own(self, tokens, targets):
        """Return what this rank has of a batch: with context parallelism a part of each sequence."""
        if self.attention is None:
            return tokens, targets
        return [self.attention.shard(x, pad=pad) if needed and x is not None else None
                for needed, x, pad in zip(self.needs, (tokens, targets), (0, -100), strict=True)]

    def expect(self, rows: int, length: int, hidden: int, dtype: torch.dtype) -> None:
        """Say what goes between stages, for a dry run: x of a batch of so many rows and tokens."""
        order, tokens = self.pipe.schedule, length // self.mesh.cp
        parts = [len(each) for each in torch.arange(rows).tensor_split(order.micro_batches)]

        def message(b):
            if not self.sequence:
                return [(dtype, True, (b, tokens, hidden))]
            rows = rows_of(torch.Size((b, tokens)), self.mesh.tp)  # this rank's, and of how many tokens they are
            return [(dtype, True, (1, rows, hidden)), (dtype, False, (b, tokens, 0))]

        self.pipe.expect({(s, k): message(parts[k]) for s in range(1, order.stages)
                          for k in range(order.micro_batches)})

    def _mean(self, loss):
        """Return the mean over the ranks that have a loss: those of the last stage."""
        mine = torch.zeros((), dtype=torch.float64, device=self.mesh.comm.device) if loss is None else loss.double()
        return self.mesh.comm.all_reduce(mine) / (self.mesh.tp * self.data.world_size)  # each rank of tp has the loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm, over all parameters of the whole model, is at most `max_norm`; return the
        norm before."""
        if self.scaler is not None:
            self.scaler.unscale_(self.engine)
        return self.engine.clip_grad_norm_(max_norm, norm_type)

    def step(self) -> None:
        """Update the parameters, and drop the gradients."""
        if self.scaler is None:
            self.engine.step()
        else:
            self.scaler.step(self.engine)
            self.scaler.update()
        self.stepped = True

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.engine.zero_grad()
        self.stepped = True

    def save(self, directory: "str | PathLike[str]", *, shared: bool = True) -> None:
        """Save all state in `directory`, for any mesh to load: see `saving.save`."""
        self.engine.save(directory, shared=shared)

    def load(self, directory: "str | PathLike[str]", *, shared: bool | None = None) -> None:
        """Load what any mesh has saved: see `saving.load`."""
        self.engine.load(directory, shared=shared)

    def save_weights(self, path: "str | PathLike[str]", dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the whole model to one safetensors file: see `saving.save_weights`."""
        self.engine.save_weights(path, dtype)
