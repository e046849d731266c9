"""Uses of the public face that a type checker must refuse, each for the reason in its comment. mypy says so of a
`type: ignore` that silences nothing (warn_unused_ignores). Checked in `make test`; never run."""

import torch

from refimpl import memory

memory.mark("x", "communication")  # type: ignore[arg-type]
memory.mark(torch.ones(2))  # type: ignore[call-arg]
print(memory.track().peek)  # type: ignore[attr-defined]
memory.human("12 B")  # type: ignore[arg-type]
words: str = memory.track().peak.total  # type: ignore[assignment]
