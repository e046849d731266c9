"""What is at the highest moment of a step, to the byte, on our GPT, another one, and models of transformers."""

import pytest
import torch
from torch.nn import functional as F
from zero_kit import ADAMW, ENGINES
from zero_steps import GradientsKept, ParametersKept, most, stack, tracked

from benchmarks.zero import models as zero_models
from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.zero import Zero3
from refimpl.zero.internals.peak_of_step import MADE, REDUCED, SHARDS, WHOLE, WIRE, peak_of_step_bytes


class TiedByARead(zero_models.SequentialGPT):
    """The head reads the table's weight, and the table's unit knows nothing of it."""

    def __init__(self):
        super().__init__(256, 64, 4, 4, 16)
        del self.head

    def forward(self, tokens, targets):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = F.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS = {
    "GPT": lambda: GPT(GPTConfig(vocab_size=256, context_length=16, layers=4, hidden=64, heads=4)),
    "Sequential": lambda: zero_models.SequentialGPT(256, 64, 4, 4, 16),
    "GPT-2": zero_models._transformers("gpt2", vocab_size=256, n_embd=64, n_positions=16, n_layer=4, n_head=4),
    "Llama": zero_models._transformers("llama", **SIZES, intermediate_size=128, max_position_embeddings=16)}
X = torch.zeros(1, 4, dtype=torch.int64)
WAYS = [(1, {}), (1, {"bucket_bytes": 60_000}), (2, {}), (2, {"bucket_bytes": 60_000}),
        (2, {"bucket_bytes": 60_000, "in_flight_bytes": 0}), (3, {}), (3, {"look_ahead": 0}), (3, {"look_ahead": 3}),
        (3, {"in_flight_bytes": 0}), (3, {"look_ahead": 0, "in_flight_bytes": 10**6})]


def order_of(model):
    """The model's modules in the order of their forwards."""
    order = []
    handles = [module.register_forward_pre_hook(lambda module, _: order.append(module)) for module in model.modules()]
    model(X, X)
    for handle in handles:
        handle.remove()
    return order


def measured(model, stage, make=None, **options):
    """Bytes of parameters and gradients at the highest moment of a third step, all on rank 0 of 4. The tracker counts a
    gradient that waits in autograd, of a table that is used twice, as a temporary tensor; others here are smaller."""
    tables = {p.nbytes for p in model.parameters() if len(p) == 256}
    tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))) or isinstance(
        model, TiedByARead)
    t = tracked((make or ENGINES[stage])(model, FakeCommunicator(0, 4), ADAMW, **options), X, X, steps=3)
    of = {name: t.timeline.nbytes[:, i] for i, name in enumerate(t.timeline.categories)}
    waiting = of["temporaries"] // max(tables) * max(tables)
    return (of["parameters"] + of["gradients"] + (waiting if tied else 0)).max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("stage", "options"), WAYS, ids=map(str, WAYS))
def test_the_highest_moment_is_that_of_the_closed_form(name, stage, options):
    model = MODELS[name]()
    said = peak_of_step_bytes(model, 4, stage, order=order_of(model), **options)
    assert sum(said.values()) == measured(model, stage, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_of_16_bit_parameters_there_are_no_shards_beside_their_masters(name, look_ahead):
    """Nor while they are gathered: each is rounded where it will be in the whole."""
    model = MODELS[name]().bfloat16()
    said = peak_of_step_bytes(model, 4, 3, order=order_of(model), look_ahead=look_ahead)
    assert sum(said.values()) == measured(model, 3, look_ahead=look_ahead)


@pytest.mark.parametrize(("stage", "options"), WAYS, ids=map(str, WAYS))
def test_what_is_read_outside_of_its_unit_stays_and_is_counted(stage, options):
    model = TiedByARead()
    order = order_of(model)
    said, less = (sum(peak_of_step_bytes(model, 4, stage, order=order, outside=outside, **options).values())
                  for outside in ([model.embedding.weight], []))
    assert said == measured(model, stage, **options) and (less < said or stage < 3)


def test_a_dry_run_sees_reads_outside_too():
    def readings():
        model = TiedByARead()
        x = torch.zeros(1, 4, dtype=torch.int64)
        return most(tracked(Zero3(model, FakeCommunicator(0, 4), ADAMW), x, x, steps=3), "parameters")

    assert memory.dry_run(readings).result == readings()


def test_it_says_what_is_there():
    """Of equal layers of 1 MiB on 4 ranks: the second one's backward, whose gradient is a bucket by itself."""
    layers, mib = stack(8, 512), 2**20
    said = peak_of_step_bytes(layers, 4, 3, in_flight_bytes=mib)
    assert said == {SHARDS: 8 * mib // 4 + 4, WHOLE: 2 * mib, MADE: mib, WIRE: mib, REDUCED: 6 * mib // 4}
    assert sum(peak_of_step_bytes(layers, 4, 3, in_flight_bytes=0).values()) == sum(said.values()) - mib
    assert peak_of_step_bytes(layers, 4, 3, look_ahead=0)[WHOLE] == mib
    with pytest.raises(ValueError, match="stage=0: expected 1, 2 or 3"):
        peak_of_step_bytes(layers, 4, 0)


@pytest.mark.parametrize("mutant", [ParametersKept, GradientsKept])
def test_an_engine_that_keeps_more_is_seen(mutant):
    options = {"bucket_bytes": 60_000} if mutant.stage == 2 else {}
    model = MODELS["GPT"]()
    said = peak_of_step_bytes(model, 4, mutant.stage, order=order_of(model), **options)
    assert measured(model, mutant.stage, mutant, **options) > sum(said.values()) + 200_000
