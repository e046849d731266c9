"""Convolutions in torch.channels_last stay so in buckets and shards, train as before, and are saved in any cut."""

import contextlib
import functools
import itertools

import pytest
import torch
from rank_pool import on_ranks
from saving_kit import differing
from torch import nn
from zero_kit import ENGINES, copied, equal, parameters_of

from refimpl.comm import FakeCommunicator
from refimpl.comm.errors import CollectiveMismatch
from refimpl.compression import GradientCompressor
from refimpl.saving import SavedStateError

LAST, ADAMW, ALONE = torch.channels_last, functools.partial(torch.optim.AdamW, lr=1e-2), FakeCommunicator(0, 1)


def norm(count, **how):
    return nn.GroupNorm(2, count)


def resnet(memory_format=LAST):
    """One of timm, of 4 blocks."""
    import outside  # noqa: F401 - before timm
    from timm.models.resnet import BasicBlock, ResNet
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=5, channels=(8, 8, 8, 16), stem_width=8, norm_layer=norm)
    model.layer1[0].conv1.weight.requires_grad_(False)
    return model.to(memory_format=memory_format)


def images(rank, step):
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(100 * step + rank)).to(memory_format=LAST)


def train(engine, steps=2):
    for step in range(engine._steps, engine._steps + steps):
        engine.backward(engine.forward(images(engine.comm.rank, step)).square().mean())
        engine.clip_grad_norm_(10.0)
        engine.step()
    return engine


def is_last(engine):
    with engine.gathered() if engine.stage == 3 else contextlib.nullcontext():
        trained = [p for p in engine.model.parameters() if p.dim() == 4]
        return all(p.is_contiguous(memory_format=LAST) for p in trained) and not trained[-2].is_contiguous()


@pytest.mark.parametrize("stage", range(4))
def test_alone_it_trains_as_before_to_the_bit(stage):
    model = resnet()
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        model(images(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = train(ENGINES[stage](resnet(), ALONE, ADAMW))
    assert is_last(engine) and equal(parameters_of(engine), copied(model))


@pytest.mark.parametrize(("world_size", "stage"), list(itertools.product((2, 3), range(4))))
def test_saved_in_one_cut_and_format_and_loaded_in_another(tmp_path, world_size, stage):
    @on_ranks(world_size, then=lambda sd: expected.append(sd))
    def saves(comm):
        engine = train(ENGINES[stage](resnet(), comm, ADAMW))
        assert is_last(engine)
        engine.save(tmp_path)
        return engine.state_dict()

    @on_ranks(5 - world_size)
    def loads(comm, sd):
        for other, memory_format in ((0, LAST), (3 - stage, torch.contiguous_format), ((stage + 1) % 4, LAST)):
            for source in (tmp_path, sd):
                engine = train(ENGINES[other](resnet(memory_format), comm, ADAMW), 1)
                engine.load(source) if source is tmp_path else engine.load_state_dict(source)
                assert differing(engine.state_dict(), sd) == []
                assert all(torch.equal(p, sd["model"][name]) for name, p in parameters_of(engine).items())

    expected = []
    saves()
    loads(sd=expected[0])


def test_what_a_hook_keeps_is_of_one_format(tmp_path):
    def made(memory_format):
        model = nn.Conv2d(8, 8, 3).to(memory_format=memory_format)
        return ENGINES[1](model, ALONE, torch.optim.SGD, hook=GradientCompressor("int8"))
    engine = made(LAST)
    engine.backward(engine.forward(torch.ones(1, 8, 5, 5)).square().mean())
    engine.step()
    engine.save(tmp_path)
    made(LAST).load(tmp_path)
    with pytest.raises(SavedStateError, match="of 1 ranks, 1 parameters in channels_last, saved on 1 ranks; here"):
        made(torch.contiguous_format).load(tmp_path)


@on_ranks(2)
def test_ranks_in_other_formats_are_named(comm):
    with pytest.raises(CollectiveMismatch):
        ENGINES[1](resnet(LAST if comm.rank else torch.contiguous_format), comm, ADAMW)
