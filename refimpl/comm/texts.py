"""What ranks say to each other: results of each rank's own work, and its errors, as text in host memory.

An exception on one rank alone would leave the others waiting for it in their next collective. Here all ranks learn of
it at once.
"""

import hashlib
import json

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .errors import RankError

SAME_BYTES = 16  # of a text's hash


def gather_results(comm, work, label=""):
    """Call `work()` on each rank and return [its result on each rank], on all ranks. Results pass through JSON.

    `label`: what ranks have done that the others wait for, such as "save: files are written". A rank may take half
    an hour for it. If `work` raises on some ranks, all ranks raise: those ranks their own exception, the others a
    RankError that names them. `work` must not call a collective.
    """
    from .hosts.patience import patient

    text = own = None
    try:
        with patient():
            text = json.dumps([None, work()])
    except Exception as error:
        own, text = error, json.dumps([f"{type(error).__name__}: {error}", None])
    answers = [json.loads(each) for each in gather_texts(comm, text, label)]
    if own:
        raise own
    failed = [rank for rank, (error, _) in enumerate(answers) if error]
    if failed:
        raise RankError("; ".join(f"rank {comm.ranks[rank]} raised {answers[rank][0]}" for rank in failed),
                        [comm.ranks[rank] for rank in failed])
    return [result for _, result in answers]


def broadcast_text(comm, text=None, src=0):
    """Return rank src's text, on all ranks."""
    text = text.encode() if comm.rank == src else b""
    length = comm.host().broadcast(torch.tensor(len(text)), src)
    return _text(comm.host().broadcast(_tensor(text, int(length)), src))


def gather_texts(comm, text, label=""):
    """Return [each rank's text], on all ranks."""
    text = text.encode()
    lengths = comm.host().all_gather(torch.tensor([len(text)]), label=label).tolist()
    rows = comm.host().all_gather(_tensor(text, max(lengths))[None], label=label)
    return [_text(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def texts_if_other(comm, what, text):
    """Return [each rank's text] if they are not all the same, else None, on all ranks alike. While they are the same,
    SAME_BYTES of each rank travel."""
    digest = hashlib.sha256(text.encode()).digest()[:SAME_BYTES]
    mine = torch.tensor([[*digest]], dtype=torch.uint8, device="cpu")
    gathered = comm.host().all_gather(mine, label=f"the check of {what}")
    if isinstance(gathered, FakeTensor) or all(each == gathered[0].tolist() for each in gathered.tolist()):
        return None
    return gather_texts(comm, text)


def _tensor(text, length):
    padded = bytearray(text.ljust(length + 1))  # torch.frombuffer refuses an empty buffer
    return torch.frombuffer(padded, dtype=torch.uint8)[:length]


def _text(tensor):
    return tensor.numpy().tobytes().decode()
