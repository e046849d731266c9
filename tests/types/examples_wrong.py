"""Uses of the public face that a type checker must refuse, each by the code in its comment. mypy says so of a
`type: ignore` that silences nothing (warn_unused_ignores). Checked in `make test`; never run."""

import torch

from refimpl import memory
from refimpl.attention import flash_attention, flash_attention_bytes
from refimpl.checkpointing import checkpoint, optimal_schedule
from refimpl.comm import Communicator, launch, ring_all_reduce
from refimpl.cross_entropy import chunked_linear_cross_entropy
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.offload import HostStore
from refimpl.tensor import tensor_parallel
from refimpl.zero import Zero3

memory.mark("x", "communication")  # type: ignore[arg-type]
memory.mark(torch.ones(2))  # type: ignore[call-arg]
print(memory.track().peek)  # type: ignore[attr-defined]
memory.human("12 B")  # type: ignore[arg-type]
words: str = memory.track().peak.total  # type: ignore[assignment]

x = torch.ones(1, 2, 8, 4)
flash_attention(x, x, x, True)  # type: ignore[call-arg]
flash_attention(x, x, x, causal="yes")  # type: ignore[arg-type]
flash_attention_bytes(8, 8)  # type: ignore[arg-type]
checkpoint(x)  # type: ignore[arg-type]
optimal_schedule([1.0], [8])  # type: ignore[call-arg]
chunked_linear_cross_entropy(x, x)  # type: ignore[call-arg]
GPT("gpt2")  # type: ignore[arg-type]
GPTConfig.named(124)  # type: ignore[arg-type]


def rank(comm: Communicator) -> None:
    Zero3(GPT(GPTConfig.named("gpt2")), 2)  # type: ignore[arg-type]
    comm.all_reduce([1, 2])  # type: ignore[arg-type]
    comm.broadcast(x)  # type: ignore[call-arg]
    ring_all_reduce(x, comm)  # type: ignore[arg-type]
    tensor_parallel(comm, comm)  # type: ignore[arg-type]
    HostStore(2)  # type: ignore[call-arg]
    comm.split([0]).barrier()  # type: ignore[union-attr]
    Mesh(tp=2).connect(2)  # type: ignore[arg-type]


launch(rank, "2")  # type: ignore[arg-type]
