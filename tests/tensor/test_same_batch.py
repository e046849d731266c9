"""Ranks of a tensor-parallel group that got different batches: an error on all of them, before they compute."""

import copy
import time
from unittest import mock

import pytest
import torch
from rank_pool import on_ranks, pooled
from tensor_kit import SPLITS, bodies, loss_of, tokens_of, whole
from torch import nn
from torch._subclasses import FakeTensorMode

from refimpl.checkpointing import recompute
from refimpl.comm import CollectiveMismatch, FakeCommunicator
from refimpl.mesh import Mesh
from refimpl.tensor import same_batch, tensor_parallel
from refimpl.tensor.closed_forms import same_batch_traffic
from refimpl.tensor.same_batch import SameBatch, checksum

PLAN = {"up": "column", "down": "row"}


def said(function, *args, **kwargs):
    """What a call raised, or None."""
    try:
        function(*args, **kwargs)
    except CollectiveMismatch as error:
        return error.ranks, str(error)
    return None


# --- models ----------------------------------------------------------------------------------------------------------


def shuffled(model, rank, what):
    """A rank's arguments: rank 1 has other ones."""
    tokens = tokens_of(model, 3, 7)
    targets = tokens.roll(-1, 1)
    return {"order": (tokens.flip(0), targets.flip(0)), "tokens": (tokens_of(model, 3, 7, seed=1), targets),
            "targets": (tokens, targets.roll(1, 0)), "shapes": (tokens[:, :5], targets[:, :5]),
            "missing": (tokens, None)}[what] if rank else (tokens, targets)


@pytest.mark.parametrize(("what", "texts"), [
    ("tokens", ["{0} has other values on ranks [1]"]), ("targets", ["{1} has other values on ranks [1]"]),
    ("order", ["{0} has other values on ranks [1]", "{1} has other values on ranks [1]"]),
    ("shapes", ["{0} is int64 (3, 7) on rank 0, int64 (3, 5) on rank 1", "{1} is int64 (3, 7) on rank 0"]),
    ("missing", ["{1} is int64 (3, 7) on rank 0, not given on rank 1"])])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("split", SPLITS)
@on_ranks(2)
def test_other_batches_are_an_error_by_name_on_all_ranks(comm, name, split, what, texts):
    names = ("tokens_BT", "targets_BT") if name == "gpt" else ("input_ids", "labels")
    model = SPLITS[split](whole(name), comm)
    before, given = comm.traffic["all_reduce"], shuffled(model, comm.rank, what)
    ranks, text = said(model, *given) if name == "gpt" else said(model, **dict(zip(names, given, strict=True)))
    assert ranks == (1,) and "ranks [1] of tensor-parallel group [0, 1] have another batch than rank 0" in text
    assert all(each.format(*names) in text for each in texts) and "seed the sampler by the data-parallel" in text
    assert text.count(";") == len(texts) - 1  # no more than what differs
    assert comm.traffic["all_reduce"] == before and said(loss_of, model, tokens_of(model, 3, 7)) is None


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, *more, mask=None, scale=1.0, past_key_values=None):
        x, mask = (x["x"], x["of"][0]) if isinstance(x, dict) else (x, mask)
        y = self.down(self.up(x).relu()) * scale
        return y if mask is None else y * mask.unsqueeze(-1)


def split_mlp(comm):
    torch.manual_seed(0)
    return tensor_parallel(MLP(), comm, PLAN)


@on_ranks(2)
def test_masks_floats_numbers_and_what_is_in_containers(comm):
    model, r = split_mlp(comm), float(comm.rank)
    x, mask = torch.ones(2, 3, 6), torch.ones(2, 3, dtype=torch.bool)
    other = mask.clone()
    other[1, 2] = comm.rank == 0
    own = torch.full((2, 2), r)
    assert said(model, {"x": x, "of": (mask,)}) is None and said(model, x, past_key_values=((own, own),)) is None
    for (ranks, text), expected in (
            (said(model, {"x": x, "of": (other,)}), "x.of.0 has"), (said(model, x, mask=other), "mask has"),
            (said(model, x + 1e-6 * r), "x has"), (said(model, x, own), "argument 1 has"),
            (said(model, x, scale=r), "scale is 0.0 on rank 0, 1.0 on rank 1"),
            (said(model.bfloat16(), (x * (1 + r)).bfloat16()[:, ::2]), "x has")):
        assert ranks == (1,) and expected in text


@on_ranks(4)
def test_other_groups_have_other_batches_and_ranks_are_those_of_the_world(comm):
    mesh = Mesh(dp=2, tp=2).connect(comm)
    model, dp = split_mlp(mesh.get_parallel_group("tp")), mesh.get_parallel_group("dp")
    x = torch.full((2, 6), float(dp.rank))
    assert said(model, x) is None
    error = said(model, x + (comm.rank == 3))
    if dp.rank:
        assert error[0] == (3,) and "than rank 2" in error[1] and "other values on ranks [3]" in error[1]
    else:
        assert error is None


def with_other_seeds(comm, checked):
    """Twenty steps with another batch on each rank: what it said, the first loss, and the last."""
    looks = SameBatch.__call__ if checked else lambda self, model, args, kwargs: None
    with mock.patch.object(SameBatch, "__call__", looks):
        model, losses = split_mlp(comm), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
            try:
                loss = (model(x) - 1).square().mean()
            except CollectiveMismatch as error:
                return type(error), losses
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return None, losses


def test_without_the_check_ranks_with_other_batches_train_on():
    assert pooled(with_other_seeds, 2, True) == [(CollectiveMismatch, [])] * 2
    for error, losses in pooled(with_other_seeds, 2, False):
        assert error is None and losses[-1] < losses[0]  # and nobody noticed


# --- once in a forward -----------------------------------------------------------------------------------------------


def counted(comm, split, how):
    """all_gathers of the check in one forward and backward: their bytes in `comm.host()`, which nothing else uses."""
    torch._dynamo.reset()
    model = SPLITS[split](whole("gpt"), comm)
    tokens = tokens_of(model)
    call = {"plain": model, "wrapped": nn.Sequential(model), "compiled": torch.compile(model, backend="eager"),
            "inference": torch.inference_mode()(model)}.get(how, model)
    if how == "whole recomputed":
        call = lambda *args: torch.utils.checkpoint.checkpoint(model, *args, use_reentrant=False)  # noqa: E731
    if how == "recomputed":
        with recompute(bodies(model)):
            call(tokens).square().mean().backward()
        return comm.host().traffic
    comm.host().reset_traffic()
    out = call(tokens)
    if how != "inference":
        out.square().mean().backward()
    return comm.host().traffic


@pytest.mark.parametrize(("split", "how"), [("sequence", "plain"), ("sequence", "recomputed"), *(
    ("tensor", how) for how in ("plain", "wrapped", "compiled", "inference", "recomputed", "whole recomputed"))])
def test_a_forward_is_checked_once_and_sends_the_closed_form(split, how):
    for N in (1, 2):
        fingerprint = (N - 1) * 17 * 8  # of the model, when it is split
        for sent in pooled(counted, N, split, how):
            extra = sent - same_batch_traffic(N)
            assert how == "recomputed" or extra.total == 0, sent
            assert how != "recomputed" or set(extra) <= {"all_gather"} and extra["all_gather"] == fingerprint, sent


def test_a_dry_run_counts_the_same():
    comm = FakeCommunicator(0, 64)
    with FakeTensorMode():
        torch.manual_seed(0)
        model = tensor_parallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), comm, {"0": "column", "1": "row"})
        comm.host().reset_traffic()
        model(torch.zeros(2, 64)).sum().backward()
    assert comm.host().traffic == same_batch_traffic(64) and same_batch_traffic(64).total == 63 * 16


class Event:
    """Stands for a GPU's: `waited` notes that somebody waited."""

    waited = 0

    def synchronize(self):
        Event.waited += 1


@on_ranks(2)
def test_values_on_a_gpu_are_compared_before_the_next_forward_and_shapes_at_once(comm):
    model, of = split_mlp(comm), same_batch.HostChecksum.of
    x, y = torch.ones(2, 6), torch.ones(2, 6) * (1 + comm.rank)
    with mock.patch.object(same_batch.HostChecksum, "of", lambda each: of(each)._replace(event=Event())):
        assert said(model, x) is None and Event.waited == 0
        assert said(model, y) is None and Event.waited == 1  # runs: nobody has waited for its sum
        ranks, text = said(model, x)
        assert ranks == (1,) and "x has other values on ranks [1] in the forward before this one" in text
        _, text = said(model, x[: 2 - comm.rank])
        assert "x is float32 (2, 6) on rank 0, float32 (1, 6) on rank 1" in text and said(model, x) is None


# --- the checksum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [
    torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_checksum_sees_every_element_and_its_place(dtype):
    x = torch.arange(15).view(3, 5).remainder(7 if dtype == torch.bool else 100).to(dtype)
    sums = {checksum(x).item(), checksum(x.flip(0)).item()}
    for i in range(x.numel()):
        y = x.clone()
        y.view(-1)[i] = 0 if y.view(-1)[i] == 1 else 1
        sums.add(checksum(y).item())
    assert len(sums) == 17 and checksum(x[0]) == checksum(x.clone()[0]) and checksum(x[1]) == checksum(x[1].clone())
    assert checksum(x.t()) == checksum(x.t().contiguous()) and checksum(x[:0]) == 0
    assert checksum(x[0, 1].expand(4, 5)) == checksum(x[0, 1]) != checksum(x[0, 0].expand(4, 5))


def test_small_numbers_do_not_cancel():
    """Batches of two tokens out of three, 4 long: Σ i·w_i alone would take (0, 2, 0) for (1, 0, 1)."""
    every = torch.cartesian_prod(*[torch.arange(3)] * 8)
    assert len({checksum(each).item() for each in every}) == 3**8


def test_pieces_of_a_long_tensor_have_their_places(monkeypatch):
    x = torch.arange(64)
    monkeypatch.setattr(same_batch, "PIECE", 16)
    assert checksum(x) != checksum(torch.cat([x[16:32], x[:16], x[32:]]))


@pytest.mark.alone
@on_ranks(2)
def test_a_check_of_16_000_tokens_takes_less_than_a_millisecond(comm):
    model = whole("gpt")
    check = SameBatch(comm, model)
    given, seconds = (tokens_of(model, 8, 1024), tokens_of(model, 8, 1024)), []
    for _ in range(200):
        comm.barrier()
        start = time.perf_counter()
        check(model, given, {})
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3  # what it costs where nobody else is computing


def test_a_split_model_is_not_copied_with_its_check():
    model = tensor_parallel(MLP(), FakeCommunicator(0, 2), PLAN)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.deepcopy(model)
