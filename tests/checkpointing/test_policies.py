"""Policies: which blocks, what stays of the model, and what they say to nonsense."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from outside.models import GROUPED, causal, text
from torch import nn

from refimpl import memory
from refimpl.checkpointing import AdaptiveCheckpoint, RecomputeError, return_on_time
from refimpl.checkpointing.policies import PARTS, DynamicCheckpoint, Recomputing, every, recompute, selective, spread
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=64, context_length=64, layers=4, hidden=32, heads=4, dropout=0.1)


@pytest.fixture
def model():
    return GPT(CONFIG)


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 64))


def gradients(model, tokens):
    torch.manual_seed(1)
    model.zero_grad()
    model(tokens, tokens).backward()
    return [p.grad.clone() for p in model.parameters()]


def kept(model, tokens):
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
    assert loss.isfinite()
    return t.now["activations"]


@pytest.mark.parametrize("part", PARTS)
def test_parts_keep_keys_and_gradients_and_less(model, tokens, part):
    keys, expected, before = list(model.state_dict()), gradients(model, tokens), kept(model, tokens)
    with selective(model.blocks, part) as applied:
        assert len(applied) == 4 and list(model.state_dict()) == keys
        assert all(map(torch.equal, gradients(model, tokens), expected)) and kept(model, tokens) < before
    assert kept(model, tokens) == before and all(map(torch.equal, gradients(model, tokens), expected))


def test_an_attention_that_is_a_module_is_a_core_too(tokens):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, q, k, v, dropout_p=0.0):
            return (self.gain * v.cumsum(2)).tanh() * q.sigmoid()

    model = GPT(CONFIG, Mean())
    expected, keys = gradients(model, tokens), list(model.state_dict())
    with selective([model.blocks[0]]):
        assert all(map(torch.equal, gradients(model, tokens), expected)) and list(model.state_dict()) == keys


@pytest.mark.parametrize(("arguments", "chosen"), [
    ({}, [0, 1, 2, 3]), ({"interval": 2}, [0, 2]), ({"interval": 2, "start_layer": 1}, [1, 3]),
    ({"start_layer": 1, "end_layer": 3}, [1, 2]), ({"start_layer": 0, "end_layer": 4, "interval": 2}, [0, 2]),
    ({"end_layer": 0}, []), ({"interval": 9}, [0]), ({"ratio": 0.5}, [1, 3]), ({"ratio": 0}, []),
    ({"ratio": 1}, [0, 1, 2, 3]), ({"ratio": 0.3}, [3])])
def test_which_blocks(model, arguments, chosen):
    with DynamicCheckpoint(model.blocks, **arguments) as policy:
        assert policy.chosen == chosen
        assert [i for i, block in enumerate(model.blocks) if block in policy.modules] == chosen
        assert [item for item in policy.plan if isinstance(item, tuple)] == [(i,) for i in chosen]


def test_a_dynamic_choice_is_changed_between_steps(model, tokens):
    policy, expected, sizes = DynamicCheckpoint(model.blocks, end_layer=0), gradients(model, tokens), []
    for share in (0, 0.25, 0.5, 0.75, 1):
        policy.change(ratio=share)
        assert all(map(torch.equal, gradients(model, tokens), expected))
        sizes.append(kept(model, tokens))
    steps = [a - b for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
    assert len(set(steps)) == 1 and steps[0] > 0, "each block saves the same"
    policy.remove()
    assert kept(model, tokens) == sizes[0]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"interval": 0}, "interval=0: expected an integer of at least 1"), ({"interval": 1.5}, "interval=1.5"),
    ({"interval": -2}, "interval=-2"), ({"interval": True}, "interval=True"),
    ({"start_layer": 5}, "start_layer=5, end_layer=4: expected 0 ≤ start_layer ≤ end_layer ≤ 4"),
    ({"start_layer": -1}, "start_layer=-1"), ({"end_layer": 5}, "end_layer=5"),
    ({"start_layer": 3, "end_layer": 1}, "start_layer=3, end_layer=1"),
    ({"ratio": 1.1}, "ratio=1.1: expected a share of the blocks, from 0 to 1"), ({"ratio": -0.1}, "ratio=-0.1"),
    ({"ratio": float("nan")}, "ratio=nan"), ({"ratio": 0.5, "interval": 2}, "ratio=0.5 beside interval=2"),
    ({"ratio": 0.5, "start_layer": 0, "end_layer": 4}, "ratio=0.5 beside start_layer=0, end_layer=4")])
def test_choices_out_of_range(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicCheckpoint(model.blocks, **arguments)
    assert not any("forward" in vars(block) for block in model.blocks)


def test_spread_is_even():
    assert spread(12, 0.25) == [3, 7, 11] and every(12, interval=4) == [0, 4, 8]
    assert all(len(spread(n, r)) == round(n * r) for n in range(1, 30) for r in (0, 0.1, 0.33, 0.5, 0.9, 1))


@pytest.mark.parametrize(("modules", "message"), [
    ([torch.sin], "cannot recompute a builtin_function_or_method: expected modules"), ([3], "cannot recompute a int")])
def test_what_is_no_module(model, modules, message):
    with pytest.raises(TypeError, match=message):
        recompute([*model.blocks, *modules])
    assert not any("forward" in vars(block) for block in model.blocks), "half of a policy stays"


def test_twice_is_refused(model):
    with recompute(model.blocks):
        with pytest.raises(ValueError, match="this Block is recomputed already"):
            recompute(model.blocks[:1])
        assert all("forward" in vars(block) for block in model.blocks)
    with selective(model.blocks):
        with pytest.raises(ValueError, match="attention of this Attention is recomputed already"):
            selective(model.blocks)


def test_unknown_parts_and_blocks_without_them(model):
    with pytest.raises(ValueError, match="part='norm': expected one of 'block', 'attention'"):
        selective(model.blocks, "norm")
    for part in ("attention core", "mlp"):
        with pytest.raises(ValueError, match=f"a Linear has no {part}.*use recompute"):
            selective([nn.Linear(2, 2)], part)


@pytest.mark.parametrize("part", ["attention core", "mlp"])
def test_blocks_before_one_without_the_part_are_as_they_were(model, part):
    untouched = [set(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=f"a Linear has no {part}"):
        selective([*model.blocks, nn.Linear(2, 2)], part)
    assert [set(vars(module)) for module in model.modules()] == untouched
    with selective(model.blocks, part) as applied:
        assert len(applied) == 4


def test_an_exception_takes_the_policy_away(model):
    with pytest.raises(ZeroDivisionError), recompute(model.blocks):
        raise ZeroDivisionError
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_forward_that_somebody_else_put_there_stays(model):
    block = model.blocks[0]
    block.forward = traced = Mock(wraps=block.forward)
    with recompute([block]):
        block(torch.randn(1, 4, 32, requires_grad=True)).sum().backward()
    assert block.forward is traced and traced.call_count == 2


def test_copies_recompute_their_own_blocks(model, tokens):
    with recompute(model.blocks):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                twin.blocks[0].mlp.down.weight.zero_()
            assert kept(twin, tokens) == kept(model, tokens)
            assert not torch.equal(gradients(twin, tokens)[2], gradients(model, tokens)[2])
        t = memory.dry_run(lambda m, x: m(x, x).backward(), model, tokens)
        assert t.peak.total < memory.dry_run(lambda m, x: m(x, x).backward(), GPT(CONFIG), tokens).peak.total


def test_a_model_under_a_policy_is_freed_with_its_last_name():
    model = GPT(CONFIG)
    applied = recompute(model.blocks)
    applied.modules.clear()
    applied._undo.clear()
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_policy_that_was_removed_holds_no_module():
    model = GPT(CONFIG)
    with recompute(model.blocks) as applied:
        assert len(applied) == 4
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert gone() is None and len(applied) == 0


def test_options_reach_checkpoint(model, tokens):
    expected = gradients(model, tokens)
    with recompute(model.blocks, save=[torch.ops.aten.addmm], early_stop=False):
        more = kept(model, tokens)
        assert all(map(torch.equal, gradients(model, tokens), expected))
    with recompute(model.blocks):
        assert kept(model, tokens) < more
    assert issubclass(RecomputeError, RuntimeError) and len(Recomputing()) == 0


class Swallowing(nn.Linear):
    """A layer with **kwargs, as those of Hugging Face's models: nothing that it is handed by mistake is an error."""

    def forward(self, x, save=None, **kwargs):
        self.handed = {"save": save, **kwargs}
        return super().forward(x)


@pytest.mark.parametrize(("policy", "name", "known"), [
    (lambda blocks: DynamicCheckpoint(blocks, k=2), "k", "start_layer, end_layer, interval, ratio, early_stop"),
    (lambda blocks: DynamicCheckpoint(blocks, intervall=2), "intervall", "start_layer, end_layer, interval, ratio"),
    (lambda blocks: recompute(blocks, use_reentrant=False), "use_reentrant", "early_stop, save, recompute_context"),
    (lambda blocks: recompute((), k=2), "k", "early_stop, save, recompute_context"),
    (lambda blocks: selective(blocks, "block", k=2), "k", "early_stop, save, recompute_context"),
    (lambda blocks: Recomputing().add(blocks[0], k=2), "k", "early_stop, save, recompute_context"),
    (lambda blocks: Recomputing().add_function(blocks[0], "extra_repr", k=2), "k", "early_stop, save")])
def test_an_option_that_nobody_knows_reaches_no_layer(policy, name, known):
    blocks = nn.ModuleList(Swallowing(4, 4) for _ in range(4))
    with pytest.raises(TypeError, match=f"has no option '{name}': expected {known}"):
        policy(blocks)
    assert not any("forward" in vars(block) for block in blocks)


def test_the_articles_words_choose_the_blocks():
    """`interval` once went on to each block's forward, which swallowed it, and every block was recomputed."""
    blocks, x = nn.ModuleList(Swallowing(4, 4) for _ in range(24)), torch.randn(2, 4, requires_grad=True)
    with DynamicCheckpoint(blocks, start_layer=0, end_layer=24, interval=2) as policy:
        assert policy.chosen == list(range(0, 24, 2))
        for block in blocks:
            x = block(x, cache=None)
    assert all(block.handed == {"save": None, "cache": None} for block in blocks)


def test_a_keyword_of_the_call_is_the_layer_s_own():
    """Also one that `checkpoint` has, too."""
    x = torch.randn(2, 4, requires_grad=True)
    for apply in (recompute, AdaptiveCheckpoint(0.5, 1, used=lambda: 1).apply):
        block = Swallowing(4, 4)
        with apply([block]):
            block(x, save="this", index=3).sum().backward()
        assert block.handed == {"save": "this", "index": 3} and block.weight.grad is not None


@pytest.mark.parametrize(("saved", "slower", "expected"), [
    (0.4, 0.25, 1.6), (0.4, 0.0, math.inf), (0.4, -0.02, math.inf), (0.0, 0.3, 0.0), (-0.1, 0.0, 0.0)])
def test_a_return_on_no_time_is_infinite_or_nothing(saved, slower, expected):
    assert return_on_time(saved, slower) == pytest.approx(expected)


@pytest.mark.parametrize("regions", ["the whole model", "single Linears"])
def test_what_saves_nothing(regions, tokens):
    """One region holds everything at once in backward; a Linear keeps its input anyway. Blocks are in between."""
    model = GPT(replace(CONFIG, dropout=0.0))
    model(tokens, tokens).backward()
    def peak():
        with memory.track(model, tokens) as t:
            model(tokens, tokens).backward()
        return t.peak.total - t.start.total
    linears, whole = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)], peak()
    with recompute([model] if regions == "the whole model" else linears):
        assert peak() == pytest.approx(whole, rel=0.01)
    with recompute(model.blocks):
        assert peak() < 0.5 * whole


@pytest.mark.parametrize("policy", [recompute, lambda layers: AdaptiveCheckpoint(1.0, 1).apply(layers)])
def test_a_cache_of_transformers_is_refused_before_it_grows_twice(policy):
    net, batch = causal("llama", **GROUPED)(), text(2, 16)()
    with policy(net.model.layers):
        with pytest.raises(ValueError, match="DynamicCache is a cache.* call the model with use_cache=False"):
            net(**batch)
        net(**batch, use_cache=False).loss.backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(**batch).loss.backward()
    assert all(map(torch.equal, found, [p.grad for p in net.parameters()]))
