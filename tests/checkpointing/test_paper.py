"""The idea in one screen has the gradients and the bytes of the hardened versions; what keeps everything has not."""

import random
from functools import partial

import pytest
import torch
from one_screen import check_paper
from paper_kit import Llama, gpt, gradients, same
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.checkpointing import checkpoint, reentrant_checkpoint, run_chain
from refimpl.checkpointing.schedule import costs, optimal_schedule, plan_peak, plan_time, time_peak_curve
from refimpl.papers import recomputation as paper

X = 4 * 32 * 64 * 4  # bytes of a block's input (B, T, C)


def test_the_file_is_one_screen():
    check_paper("checkpointing", "recomputation")


class Chain(nn.Module):
    """A model as its embedding, functions of x, and a loss."""

    def __init__(self, name):
        super().__init__()
        if name == "gpt":
            self.model = gpt(layers=4, positions="rotary")
            self.embed, self.layers, self.head = self.model.embed, self.model.blocks, self.model.predict
            self.rotate = self.model.rotation
        else:
            self.model = Llama().inner
            inner = self.model.model
            self.embed, self.layers, self.norm = inner.embed_tokens, [*inner.layers, *inner.layers], inner.norm
            self.rotate = lambda x: inner.rotary_emb(x, torch.arange(x.shape[1])[None])
            self.head = lambda x, t: F.cross_entropy(self.model.lm_head(self.norm(x)).flatten(0, 1), t.flatten())

    def functions(self, x):
        rotation = self.rotate(x)
        if isinstance(self.layers, list):
            return [partial(layer, position_embeddings=rotation) for layer in self.layers]
        return [lambda x, layer=layer: layer(x, rotation) for layer in self.layers]


def step(name, run):
    """Run a forward and a backward: (gradients, bytes after the forward, bytes at the peak)."""
    torch.manual_seed(0)
    chain, tokens = Chain(name), torch.randint(1, 256, (4, 32))
    with memory.track(chain, tokens) as t:
        x = chain.embed(tokens)
        loss = chain.head(run(chain.functions(x), x), tokens)
        del x
        after = t.now.total
        loss.backward()
    return gradients(chain), after, t.peak.total


PLANS = {"each block": [(0,), (1,), (2,), (3,)], "two and two": [(0, 1), (2, 3)], "one in another": [((0, 1), 2), 3]}


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_to_the_bit_and_kept_bytes_to_the_byte(name, plan, monkeypatch):
    def backward_without_outputs(ctx, *gradients):
        """The idea's backward, which lets go of the region's output, since it knows its place in the graph."""
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            edge = torch.autograd.graph.get_gradient_edge(ctx.fn(*inputs))
        torch.autograd.backward([edge], gradients)
        return None, *(x.grad for x in inputs)
    idea, kept, peak = step(name, lambda functions, x: paper.run_chain(functions, plan, x))
    hardened, kept_there, peak_there = step(name, lambda functions, x: run_chain(functions, plan, x))
    assert same(idea, hardened) and kept == kept_there
    # Until the inner backward is through, its call holds the output of the region; with one region in another, those of
    # both, and the gradient that the outer one was given.
    levels = 1 + any(isinstance(each, tuple) for item in plan if isinstance(item, tuple) for each in item)
    assert peak - peak_there == (2 * levels - 1) * X
    monkeypatch.setattr(paper.Checkpoint, "backward", staticmethod(backward_without_outputs))
    idea, _, peak_without = step(name, lambda functions, x: paper.run_chain(functions, plan, x))
    assert same(idea, hardened) and peak - peak_without == levels * X
    monkeypatch.undo()
    everything, kept_by_all, peak_of_all = step(name, lambda functions, x: paper.run_chain(functions, range(4), x))
    assert same(idea, everything) and kept_by_all > kept + 30 * X and peak_of_all > peak + 10 * X  # saves nothing


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_all_bytes_are_those_of_the_reentrant_one(name):
    def each(how):
        def run(functions, x):
            for function in functions:
                x = how(function, x)
            return x
        return run
    idea, *nbytes = step(name, each(paper.checkpoint))
    hardened, *nbytes_there = step(name, each(reentrant_checkpoint))
    assert same(idea, hardened) and nbytes == nbytes_there


def test_in_fp64_several_inputs_get_the_gradients_of_the_plain_call():
    x, w = (torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = []
    for how in (paper.checkpoint, checkpoint, lambda fn, *inputs: fn(*inputs)):
        how(lambda x, w: (x @ w).tanh() @ w, x, w).sum().backward()
        found.append([x.grad, w.grad])
        x.grad = w.grad = None
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("seed", range(40))
def test_the_schedule_is_as_fast_as_the_hardened_one_at_each_budget(seed):
    drawn = random.Random(seed)
    n = drawn.randint(1, 6)
    f, a, s = ([drawn.randint(1, top) for _ in range(n)] for top in (9, 9, 30))
    b = [2 * each for each in f]
    chain, curve = costs(f, s, a), time_peak_curve(f, s, a)
    for peak, time in curve:
        found, plan = paper.optimal_schedule(f, b, a, s, peak)
        assert found == time == optimal_schedule(f, s, a, budget=peak).time
        assert plan_time(chain, plan) == time and plan_peak(chain, plan) == peak  # of equals, ours may be another plan
        assert paper.optimal_schedule(f, b, a, s, peak - 1)[0] > time
    assert paper.optimal_schedule(f, b, a, s, curve[0][0] - 1) == (float("inf"), [])
    assert curve[-1][1] == sum(f) + sum(b), "with room for all, nothing is recomputed"
