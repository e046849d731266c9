"""Checks that all ranks do the same thing, so that a rank that differs is named instead of waited for.

Collectives match by their order alone. A rank that is one micro-batch behind, or trains another model, would make the
others hang or, worse, add gradients that do not belong together. So before each backward and each step every rank sends
24 bytes that say what it is about to do, and when an engine is made, a fingerprint of its model.
"""

import hashlib
import json

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...comm.errors import CollectiveMismatch, RankError
from ...comm.traffic import ring_traffic

PHASES = ("forward", "backward", "step", "clip_grad_norm_", "state_dict", "load_state_dict", "save", "load",
          "save_weights")
CHECK_BYTES = 3 * 8  # phase, step and micro-batch, as int64


def check_model(comm, buckets):
    """Raise CollectiveMismatch, naming the ranks, if parameters differ from rank 0's in name, shape, dtype or order."""
    lines = [f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}" for bucket in buckets
             for slot in bucket.slots]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
    mine = torch.tensor([len(lines), *digest], dtype=torch.int64, device=comm.device)
    gathered = comm.all_gather(mine[None])
    if isinstance(gathered, FakeTensor):
        return
    fingerprints = gathered.tolist()
    differ = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
    if differ:
        counts = {rank: each[0] for rank, each in enumerate(fingerprints)}
        raise CollectiveMismatch(f"ranks {differ} have another model than rank 0 (parameters on each rank: {counts}): "
                                 "build the same modules in the same order, in the same dtype, on every rank", differ)


def check_phase(comm, phase, step, micro_batch):
    """Raise CollectiveMismatch, naming the ranks, if some rank is about to do something else than rank 0."""
    mine = torch.tensor([[PHASES.index(phase), step, micro_batch]], dtype=torch.int64, device=comm.device)
    gathered = comm.all_gather(mine)
    if isinstance(gathered, FakeTensor):
        return
    checks = gathered.tolist()
    differ = [rank for rank, each in enumerate(checks) if each != checks[0]]
    if differ:
        lines = "; ".join(f"rank {rank}: {PHASES[phase]} of micro-batch {micro_batch} in step {step}"
                          for rank, (phase, step, micro_batch) in enumerate(checks))
        raise CollectiveMismatch(f"ranks {differ} are elsewhere than rank 0: {lines}. Each rank calls backward as "
                                 "often as the others before each step", differ)


def used_on_any_rank(comm, used):
    """Return, for each parameter, whether some rank has a gradient of it; `used` says so of this rank."""
    found = comm.all_reduce(torch.tensor(used, dtype=torch.uint8, device=comm.device), "max")
    return list(used) if isinstance(found, FakeTensor) else [bool(each) for each in found.tolist()]


def gather_results(comm, work):
    """Call `work()` on each rank and return [its result on each rank], on all ranks. Results pass through JSON.

    If `work` raises on some ranks, all ranks raise: those ranks their own exception, the others a RankError that names
    them. `work` must not call a collective.
    """
    text = own = None
    try:
        text = json.dumps([None, work()])
    except Exception as error:
        own, text = error, json.dumps([f"{type(error).__name__}: {error}", None])
    answers = [json.loads(each) for each in _gather_texts(comm, text)]
    if own:
        raise own
    failed = [rank for rank, (error, _) in enumerate(answers) if error]
    if failed:
        raise RankError("; ".join(f"rank {rank} raised {answers[rank][0]}" for rank in failed), failed)
    return [result for _, result in answers]


def broadcast_text(comm, text=None):
    """Return rank 0's text, on all ranks."""
    text = text.encode() if comm.rank == 0 else b""
    length = comm.broadcast(torch.tensor(len(text), device=comm.device), 0)
    return _text(comm.broadcast(_tensor(text, int(length), comm.device), 0))


def _gather_texts(comm, text):
    """Return [each rank's text], on all ranks."""
    text = text.encode()
    lengths = comm.all_gather(torch.tensor([len(text)], device=comm.device)).tolist()
    rows = comm.all_gather(_tensor(text, max(lengths), comm.device)[None])
    return [_text(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _tensor(text, length, device):
    padded = bytearray(text.ljust(length + 1))  # torch.frombuffer refuses an empty buffer
    return torch.frombuffer(padded, dtype=torch.uint8)[:length].to(device)


def _text(tensor):
    return tensor.cpu().numpy().tobytes().decode()


def consistency_traffic(world_size, rank, parameters, checks, clips=0):
    """Return {collective: bytes} that a rank sends for these checks in one step.

    `checks`: how often `check_phase` is called (for each backward, for the step, at stage 3 also for each forward).
    `clips`: calls of clip_grad_norm_, each one check more and a norm of 8 bytes. And one byte for each of the
    `parameters`, in `used_on_any_rank`.
    """
    check = ring_traffic("all_gather", world_size * CHECK_BYTES, world_size)
    return {"all_gather": check * (checks + clips),
            "all_reduce": ring_traffic("all_reduce", parameters, world_size, rank)
            + clips * ring_traffic("all_reduce", 8, world_size, rank, 8)}
