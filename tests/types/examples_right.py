"""Uses of the public face that a type checker must accept. Checked by mypy in `make test`; never run."""

from functools import partial

import torch
from torch import nn

from refimpl import memory
from refimpl.accumulation import MicroBatch, accumulate, find_micro_batch
from refimpl.attention import flash_attention, reference_attention_bytes
from refimpl.checkpointing import Schedule, checkpoint, optimal_schedule
from refimpl.comm import Communicator, Handle, launch, ring_traffic
from refimpl.cross_entropy import chunked_linear_cross_entropy
from refimpl.engine import ParallelEngine, together
from refimpl.mesh import Mesh
from refimpl.mixed_precision import AdaptiveLossScaler, autocast
from refimpl.model import GPT, GPTConfig
from refimpl.offload import HostStore
from refimpl.zero import Zero3


def meters(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    with memory.track(model, optimizer) as tracked:
        mark: torch.Tensor = memory.mark(torch.ones(2), "communication")
    with memory.measure() as measured:
        mark.sum()
    peak: memory.Ledger = tracked.peak
    rows: list[tuple[str, int]] = tracked.top(by="module")
    dry = memory.dry_run(lambda width: torch.ones(width), 8)
    predicted: memory.Ledger = memory.model_state_bytes(1000, optimizer="adamw")
    return peak.total + measured.peak + len(rows) + dry.peak["gradient"] + predicted.total


def rank(comm: Communicator, tokens: torch.Tensor) -> float:
    engine = Zero3(GPT(GPTConfig.named("gpt2")), comm, optimizer=partial(torch.optim.AdamW, lr=1e-3), store=HostStore())
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    engine.save("saved")
    sent: Handle | None = comm.send(tokens, 1)
    group: Communicator | None = comm.split([0, 1])
    return comm.traffic.total + ring_traffic("all_reduce", 8, comm.world_size) + (sent is None) + (group is None)


def splits(comm: Communicator, tokens: torch.Tensor) -> torch.Tensor:
    engine: ParallelEngine = together(GPT(GPTConfig.named("gpt2")), Mesh(tp=2, pp=2).connect(comm))
    return engine.train_step(tokens, tokens)


def one_device(model: nn.Module, q: torch.Tensor, tokens: torch.Tensor) -> None:
    with autocast(torch.bfloat16):
        out: torch.Tensor = checkpoint(model, q, early_stop=False)
    loss: torch.Tensor = chunked_linear_cross_entropy(out, torch.ones(8, 4), tokens, chunk_size=16)
    scale: float = AdaptiveLossScaler(growth_interval=100).get_scale()
    mean: torch.Tensor = accumulate(model, tokens, micro_batch=2, loss_fn=lambda model, tokens: model(tokens) * scale)
    found: MicroBatch = find_micro_batch(model, 64, 2**30)
    plan: Schedule = optimal_schedule([1.0, 2.0], [8, 8], budget=16)
    flash_attention(q, q, q, causal=True, window=128)
    print(loss, mean, found, plan, reference_attention_bytes((1, 2, 8, 4), q.shape))


results: list = launch(rank, 2, torch.ones(2, 8), timeout=30)
