"""Checks that all ranks do the same thing, so that a rank that differs is named instead of waited for.

Collectives match by their order alone. A rank that is one micro-batch behind, or trains another model, would make the
others hang or, worse, add gradients that do not belong together. So before each backward and each step every rank sends
24 bytes that say what it is about to do, with a hash of all collectives that it has begun (`collective_order`); and
when an engine is made, a fingerprint of its model. All of this is in host memory and goes by `comm.host()`: no GPU
waits for it, and it works where the collectives of tensors are out of step.
"""

import functools
import hashlib
import json

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .collective_order import BASE, PRIME, difference
from .errors import CollectiveMismatch
from .texts import gather_texts, texts_if_other
from .traffic import ring_traffic

PHASES = ("forward", "backward", "step", "clip_grad_norm_", "state_dict", "load_state_dict", "save", "load",
          "save_weights")
CHECK_BYTES = 3 * 8  # phase and micro-batch, step, hash, as int64


def check_model(comm, lines, about=""):
    """Raise CollectiveMismatch, naming the ranks, if parameters differ from rank 0's in name, shape, dtype or order:
    `lines` has a text that says so of each; or if the text `about` the model does."""
    digest = hashlib.sha256("\n".join([*lines, about]).encode()).digest()[:16]
    gathered = comm.host().all_gather(torch.tensor([[len(lines), *digest]], dtype=torch.int64),
                                      label="the model's fingerprint")
    if isinstance(gathered, FakeTensor):
        return
    fingerprints = gathered.tolist()
    if differ := comm.differing(fingerprints):
        counts = {rank: each[0] for rank, each in zip(comm.ranks, fingerprints, strict=True)}
        raise CollectiveMismatch(f"ranks {differ} have another model than rank {comm.ranks[0]} (parameters on each "
                                 f"rank: {counts}): build the same modules in the same order, in the same dtype, by "
                                 "the same code, on every rank", differ)


def check_same(comm, what, text):
    """Raise CollectiveMismatch, naming ranks and what each has, if the `text` of some rank differs from rank 0's.
    `what`: what the text is of, for the error."""
    texts = texts_if_other(comm, what, text)
    if texts is None:
        return
    differ = comm.differing(texts)
    raise CollectiveMismatch(f"ranks {differ} have another {what} than rank {comm.ranks[0]}: "
                             + "; ".join(f"rank {rank}: {each}" for rank, each in zip(comm.ranks, texts, strict=True))
                             + f". Give every rank the same {what}", differ)


def check_phase(comm, phase, step, micro_batch, parts=(), written=None, settings=None):
    """Raise CollectiveMismatch, naming the ranks, if some rank differs from rank 0 in what it is about to do (`phase`,
    `step`, `micro_batch`), in the collectives that it has begun in `comm` or in its sub-groups `parts`, in what modules
    wrote to parameters (`written`, {name: a number of all bits}) or in `settings`, {name: value}."""
    orders, written, settings = [comm.order, *(part.order for part in parts)], written or {}, settings or {}
    numbers = [order.digest for order in orders]
    for each in filter(None, (written, settings)):
        numbers.append(int.from_bytes(hashlib.sha256(json.dumps(each, sort_keys=True).encode()).digest()[:7]))
    digest = functools.reduce(lambda one, next: (one * BASE + next) % PRIME, numbers)
    mine = [PHASES.index(phase) + len(PHASES) * micro_batch, step, digest]
    gathered = comm.host().all_gather(torch.tensor([mine], dtype=torch.int64), label=f"the check before {phase}")
    if isinstance(gathered, FakeTensor):
        return
    checks = gathered.tolist()
    if differ := comm.differing([each[:2] for each in checks]):
        lines = "; ".join(f"rank {rank}: {PHASES[packed % len(PHASES)]} of micro-batch {packed // len(PHASES)} in step "
                          f"{step}" for rank, (packed, step, _) in zip(comm.ranks, checks, strict=True))
        raise CollectiveMismatch(f"ranks {differ} are elsewhere than rank {comm.ranks[0]}: {lines}. Each rank calls "
                                 "backward as often as the others before each step", differ)
    if any(each[2] != checks[0][2] for each in checks):
        from .same_model import check_settings

        told = [json.loads(each) for each in gather_texts(comm, json.dumps([written, settings]))]
        check_settings(comm, [each for _, each in told], f"before {phase} in step {step}, ")
        others = [each for each, _ in told]
        for name in dict.fromkeys(name for each in others for name in each):
            if differ := comm.differing([each.get(name) for each in others]):
                raise CollectiveMismatch(f"before {phase} in step {step}, a module has written other values to {name} "
                                         f"on ranks {differ} than on rank {comm.ranks[0]}, or on some ranks alone, as "
                                         "nn.Embedding(max_norm=…) shortens the rows of its own batch: each rank would "
                                         "train another model. Write what is alike on all ranks", differ)
        recent = [json.loads(each) for each in gather_texts(comm, json.dumps([order.recent for order in orders]))]
        found = [difference({comm.ranks[rank]: each[i] for rank, each in enumerate(recent)})
                 for i in range(len(orders))]
        text, differ = next((each for each in found if each[1]), found[0])
        raise CollectiveMismatch(f"before {phase} in step {step}, {text}\nEach rank has to run the same units in the "
                                 "same order: none may leave out a layer that others run (LayerDrop, an early exit)",
                                 differ)


def used_on_any_rank(comm, parameters, used):
    """Return those of the parameters that some rank has a gradient of; `used` are those that this rank has one of."""
    mine = [p in used for p in parameters]
    found = comm.host().all_reduce(torch.tensor(mine, dtype=torch.uint8), "max", label="which parameters are used")
    return {p for p, each in zip(parameters, mine if isinstance(found, FakeTensor) else found.tolist(), strict=True)
            if each}


def agreement_traffic(world_size, rank, parameters, checks, clips=0):
    """Return {collective: bytes} that a rank sends for these checks in one step.

    `checks`: how often `check_phase` is called (for each backward, for the step, at stage 3 also for each forward).
    `clips`: calls of clip_grad_norm_, each one check more and a norm of 8 bytes. And one byte for each of the
    `parameters`, in `used_on_any_rank`.
    """
    check = ring_traffic("all_gather", world_size * CHECK_BYTES, world_size)
    return {"all_gather": check * (checks + clips),
            "all_reduce": ring_traffic("all_reduce", parameters, world_size, rank)
            + clips * ring_traffic("all_reduce", 8, world_size, rank, 8)}
