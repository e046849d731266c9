"""The idea in one screen beside the hook: the same numbers, the same residual, the same traffic."""

from unittest import mock

import pytest
import torch
from one_screen import check_paper
from rank_pool import pooled
from torch import nn
from zero_kit import SGD, equal

from refimpl.comm.agreement import agreement_traffic
from refimpl.compression import GradientCompressor
from refimpl.papers import compression as paper
from refimpl.zero import DataParallel

RATIO, STEPS = 0.1, 6


def test_it_is_one_screen():
    check_paper("compression", "compression")


def layers():
    """Sizes of which each fills a bucket without padding; a bucket holds one tensor."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


class WithoutMemory(paper.TopK):
    """The mutant: what is not sent is forgotten."""

    def average(self, name, gradient):
        self.residual.pop(name, None)
        return super().average(name, gradient)


class Dense(paper.TopK):
    """The mutant that saves nothing: zeros are sent, too."""

    def average(self, name, gradient):
        sent = super().average(name, gradient)
        self.comm.all_reduce(gradient)
        return sent


def read(model, comm, backward, step):
    losses, before = [], comm.traffic
    for i in range(STEPS):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * i + comm.rank))
        loss = model(x).square().mean()
        backward(loss)
        step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, dict(comm.traffic - before)


def by_paper(comm, topk):
    model = layers()
    with mock.patch.object(paper, "TopK", topk):
        trainer = paper.Trainer(model, comm, SGD, RATIO)
    result = read(model, comm, torch.Tensor.backward, trainer.step)
    return *result, {name: trainer.topk.residual[name].view(p.shape) for name, p in model.named_parameters()}


def by_hook(comm):
    model, compressor = layers(), GradientCompressor("topk", RATIO)
    engine = DataParallel(model, comm, SGD, bucket_bytes=1, hook=compressor)
    result = read(model, comm, engine.backward, engine.step)
    residual = {slot.name: slot.view(compressor.kept[key]["residual"])
                for key, bucket in enumerate(engine.buckets) for slot in bucket.slots}
    return *result, residual


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_numbers_residuals_and_traffic(world_size, topk=paper.TopK):
    hooks, papers = pooled(by_hook, world_size), pooled(by_paper, world_size, topk)
    for rank, (ours, its) in enumerate(zip(hooks, papers, strict=True)):
        assert ours[0] == its[0] and ours[0][0] != ours[0][-1]
        assert equal(ours[1], its[1]) and equal(ours[3], its[3])
        checks = agreement_traffic(world_size, rank, 4, 2)
        assert {name: n - STEPS * checks.get(name, 0) for name, n in ours[2].items()} == {
            name: its[2].get(name, 0) for name in ours[2]}
        sent = sum(8 * max(1, round(RATIO * n)) for n in (512, 32, 512, 16))
        assert sum(its[2].values()) == STEPS * (world_size - 1) * sent


@pytest.mark.parametrize("mutant", [WithoutMemory, Dense])
def test_a_version_that_forgets_or_saves_nothing_fails_here(mutant):
    with pytest.raises(AssertionError):
        test_the_same_numbers_residuals_and_traffic(2, mutant)


def test_all_is_sent_in_the_end():
    """Σ of what was sent, plus the residual, is Σ of all gradients; without the residual it is not."""
    for memory in (True, False):
        compressor, sent, given = GradientCompressor("topk", 0.05, memory), torch.zeros(100), torch.zeros(100)
        for step in range(50):
            g = torch.randn(100, generator=torch.Generator().manual_seed(step)).double()
            given, sent = given + g, sent + compressor.decompress(compressor.compress(g))
        assert ((sent + compressor.kept[0].get("residual", 0) - given).abs().max() < 1e-12) == memory
