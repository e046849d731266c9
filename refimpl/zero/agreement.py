"""What ranks tell each other before they communicate, so that ranks that differ are named instead of waited for.

Collectives match by their order alone. A rank that is one micro-batch behind, or trains another model, would make the
others hang, or worse, add up what does not belong together. So each backward and each step begins with a card of 24
bytes from every rank, and the making of an engine with a fingerprint of its model.
"""

import hashlib
import json

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..comm.errors import CollectiveMismatch, RankError
from ..comm.traffic import ring_traffic

PHASES = ("forward", "backward", "step", "clip_grad_norm_", "state_dict", "load_state_dict", "save", "load",
          "save_weights")
CARD = 3 * 8  # bytes: phase, step, micro-batch


def check_model(comm, buckets):
    """CollectiveMismatch naming the ranks whose parameters differ in name, shape, dtype or order."""
    lines = [f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}" for bucket in buckets
             for slot in bucket.slots]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
    mine = torch.tensor([len(lines), *digest], dtype=torch.int64, device=comm.device)
    told = comm.all_gather(mine[None])
    if isinstance(told, FakeTensor):
        return
    differ = [rank for rank, card in enumerate(told.tolist()) if card != told[0].tolist()]
    if differ:
        counts = {rank: card[0] for rank, card in enumerate(told.tolist())}
        raise CollectiveMismatch(f"ranks {differ} have another model than rank 0 (parameters on each rank: {counts}): "
                                 "build the same modules in the same order, in the same dtype, on every rank", differ)


def check_phase(comm, phase, step, micro_batch):
    """CollectiveMismatch naming the ranks that are about to do something else than rank 0."""
    mine = torch.tensor([[PHASES.index(phase), step, micro_batch]], dtype=torch.int64, device=comm.device)
    told = comm.all_gather(mine)
    if isinstance(told, FakeTensor):
        return
    cards = told.tolist()
    differ = [rank for rank, card in enumerate(cards) if card != cards[0]]
    if differ:
        said = "; ".join(f"rank {rank}: {PHASES[card[0]]} of micro-batch {card[2]} in step {card[1]}"
                         for rank, card in enumerate(cards))
        raise CollectiveMismatch(f"ranks {differ} are elsewhere than rank 0: {said}. Each rank calls backward as often "
                                 "as the others before each step", differ)


def used_anywhere(comm, used):
    """Which parameters some rank has a gradient for: booleans, as `used` has them for this rank."""
    told = comm.all_reduce(torch.tensor(used, dtype=torch.uint8, device=comm.device), "max")
    return list(used) if isinstance(told, FakeTensor) else [bool(each) for each in told.tolist()]


def agreed(comm, work):
    """[what `work()` returned on each rank], on all ranks: of what JSON can hold. Or an exception on all: its own on a
    rank where it raised one, elsewhere RankError naming that rank. `work` calls no collective."""
    text = own = None
    try:
        text = json.dumps([None, work()])
    except Exception as error:
        own, text = error, json.dumps([f"{type(error).__name__}: {error}", None])
    told = [json.loads(each) for each in _tell(comm, text)]
    if own:
        raise own
    failed = [rank for rank, (error, _) in enumerate(told) if error]
    if failed:
        raise RankError("; ".join(f"rank {rank} raised {told[rank][0]}" for rank in failed), failed)
    return [answer for _, answer in told]


def told_by_first(comm, text=None):
    """Rank 0's text, on all ranks."""
    text = text.encode() if comm.rank == 0 else b""
    length = comm.broadcast(torch.tensor(len(text), device=comm.device), 0)
    return _text(comm.broadcast(_tensor(text, int(length), comm.device), 0))


def _tell(comm, text):
    """[every rank's text]."""
    text = text.encode()
    lengths = comm.all_gather(torch.tensor([len(text)], device=comm.device)).tolist()
    told = comm.all_gather(_tensor(text, max(lengths), comm.device)[None])
    return [_text(row[:length]) for row, length in zip(told, lengths, strict=True)]


def _tensor(text, length, device):
    padded = bytearray(text.ljust(length + 1))  # a buffer of no bytes is refused
    return torch.frombuffer(padded, dtype=torch.uint8)[:length].to(device)


def _text(tensor):
    return tensor.cpu().numpy().tobytes().decode()


def agreement_traffic(world_size, rank, parameters, cards, clips=0):
    """{collective: bytes} that a rank sends in one step to agree: so many cards (one for each backward and for the
    step, stage 3 also for each forward), another to clip, with a norm of 8 bytes, and a byte for each tensor."""
    card = ring_traffic("all_gather", world_size * CARD, world_size)
    return {"all_gather": card * (cards + clips),
            "all_reduce": ring_traffic("all_reduce", parameters, world_size, rank)
            + clips * ring_traffic("all_reduce", 8, world_size, rank, 8)}
