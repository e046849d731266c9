"""The idea in one screen: the gradient of the whole sequence, on our GPT and on transformers' LLaMA, and the bytes of
`ChunkedSequenceProcessor`; one chunk for everything saves nothing."""

from functools import partial

import pytest
import torch
from one_screen import check_paper
from outside.models import GROUPED, causal
from paper_kit import gpt, gradients, same
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.papers import sequence_length as paper
from refimpl.sequence_length import ChunkedSequenceProcessor, carried_bytes

LENGTH = 64


def test_the_file_is_one_screen():
    check_paper("sequence_length", "sequence_length")


class InChunks(nn.Module):
    """A model, with the loss of one chunk of a sequence."""
    def __init__(self, inner, tokens_BT, targets_BT):
        super().__init__()
        self.inner, self.batch, self.count = inner, (tokens_BT, targets_BT), (targets_BT != -100).sum()

    def step(self, chunk_size):
        return paper.forward_and_backward(self.loss_of_chunk, LENGTH, chunk_size)


class OurGPT(InChunks):
    def __init__(self, *batch):
        super().__init__(gpt(context_length=LENGTH), *batch)

    def loss_of_chunk(self, first, last, cache):
        part = [each[:, first:last] for each in self.batch]
        layers = [block.attention for block in self.inner.blocks]
        before = [layer.attention for layer in layers]
        def attention_of_chunk(q, k, v, number, **options):
            return before[number](q, cache.carry(("k", number), k), cache.carry(("v", number), v), **options)

        for number, layer in enumerate(layers):
            layer.attention = partial(attention_of_chunk, number=number)
        try:
            return self.inner(*part, offset=first, reduction="sum") / self.count
        finally:
            for layer, attention in zip(layers, before, strict=True):
                layer.attention = attention

    def loss(self):
        return self.inner(*self.batch)


class Outside(InChunks):
    """transformers' LLaMA, with an attention from its registry."""
    def __init__(self, *batch):
        from transformers import AttentionInterface

        AttentionInterface.register("in_chunks", self.attend)
        super().__init__(causal("llama", attention="in_chunks", **GROUPED)(), *batch)
        self.cache = None

    def attend(self, module, q, k, v, mask, scaling=None, dropout=0.0, **options):
        if self.cache is not None:
            k, v = (self.cache.carry((name, module.layer_idx), each) for name, each in (("k", k), ("v", v)))
        T, S = q.shape[2], k.shape[2]
        seen_TS = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        out = F.scaled_dot_product_attention(q, k, v, seen_TS, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def loss_of_chunk(self, first, last, cache):
        self.cache = cache
        tokens, targets = (each[:, first:last] for each in self.batch)
        logits = self.inner(input_ids=tokens, position_ids=torch.arange(first, last)[None], use_cache=False).logits
        self.cache = None
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / self.count

    def loss(self):
        logits = self.inner(input_ids=self.batch[0], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), self.batch[1].flatten())


MODELS = {"gpt": OurGPT, "llama": Outside}


def built(name, dtype=torch.float32):
    torch.manual_seed(0)
    tokens, targets = torch.randint(1, 256, (2, 2, LENGTH))
    targets[:, 5:23] = -100
    return MODELS[name](tokens, targets).to(dtype)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
def test_loss_and_gradients_are_those_of_the_whole(name, chunk_size, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # of the logits
    model = built(name, torch.float64)
    loss = model.loss()
    loss.backward()
    expected = gradients(model)
    assert (model.step(chunk_size) - loss).abs() < 1e-12
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("chunk_size", [7, 16])
def test_loss_and_gradients_are_the_hardened_ones_to_the_bit(chunk_size):
    model = built("gpt")
    loss, found = model.step(chunk_size), gradients(model)
    hardened = ChunkedSequenceProcessor(model.inner, chunk_size)(*model.batch)
    hardened.backward()
    assert torch.equal(loss, hardened) and same(found, gradients(model))


def test_without_the_gradients_of_later_chunks_it_is_another_gradient(monkeypatch):
    model = built("gpt")
    model.step(16)
    expected = gradients(model)
    monkeypatch.setattr(paper.Carry, "backward", staticmethod(
        lambda ctx, gradient: (gradient[:, :, slice(*ctx.place)], None, None, None, None)))
    model.step(16)
    assert max((a - b).norm() / b.norm() for a, b in zip(gradients(model), expected, strict=True)) > 0.1


def peak(name, run):
    model = built(name)
    with memory.track(model, *model.batch) as t:
        run(model)
    return t.peak


def test_bytes_are_the_hardened_ones():
    idea = peak("gpt", lambda model: model.step(16))
    hardened = peak("gpt", lambda model: ChunkedSequenceProcessor(model.inner, 16)(*model.batch).backward())
    assert hardened.total - idea.total == 4  # the gradient of its loss, which a caller's backward() hands to it
    carried = carried_bytes(built("gpt").inner.config, 2, LENGTH)
    assert hardened["keys and values"] == 2 * carried  # the idea gives them no name: they are as large, unnamed
    assert sum(idea[each] - hardened[each] for each in ("activations", "temporaries")) == 2 * carried - 4


@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_saves_nothing(name):
    whole = peak(name, lambda model: model.loss().backward())
    one = peak(name, lambda model: model.step(LENGTH))
    few = peak(name, lambda model: model.step(8))
    assert few["activations"] + few["temporaries"] < 0.6 * (whole["activations"] + whole["temporaries"])
    assert few.total < whole.total < one.total
