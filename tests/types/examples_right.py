"""Uses of the public face that a type checker must accept. Checked by mypy in `make test`; never run."""

import torch
from torch import nn

from refimpl import memory


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
