"""Which layers each stage has; and a stage that is built alone."""

import dataclasses
import gc
import itertools

import pytest
import torch
from outside.models import GROUPED, causal
from rank_pool import pooled
from tensor_kit import bodies
from torch import nn

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.pipeline import build, partition, pipeline
from refimpl.pipeline.partition import balanced
from refimpl.pipeline.tied import shared

CONFIG = GPTConfig(vocab_size=512, context_length=32, layers=6, hidden=32, heads=4)
UNTIED = dataclasses.replace(CONFIG, tied=False)
HF = {"gpt2": causal("gpt2", vocab_size=61, n_embd=32, n_head=4, n_layer=6, n_positions=16),
      "llama": causal("llama", **GROUPED | {"num_hidden_layers": 6}),
      "tied llama": causal("llama", **GROUPED | {"num_hidden_layers": 6, "tie_word_embeddings": True})}


MODELS = {"gpt": lambda: GPT(CONFIG), "untied gpt": lambda: GPT(UNTIED), **HF,
          "sequential": lambda: nn.Sequential(*(nn.Linear(width, 8) for width in (8, 8, 64, 8, 8, 8)))}


def layers_of(stages):
    return [len(stage if type(stage) is nn.Sequential else bodies(stage)) for stage in stages]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_have_the_names_and_the_parameters_of_the_model(name, stages):
    model, found = MODELS[name](), {}
    before = dict(model.named_parameters(remove_duplicate=False))
    parts = partition(model, stages, "uniform")
    for part in parts:
        here = dict(part.named_parameters(remove_duplicate=False))
        assert not found.keys() & here.keys()
        found |= here
    assert found == before and all(found[key] is before[key] for key in before)
    assert dict(model.named_parameters(remove_duplicate=False)) == before  # the model has not changed
    assert name != "sequential" or [key for part in parts for key in part.state_dict()] == list(model.state_dict())


def test_uniform_and_parameters_and_cost():
    assert layers_of(partition(GPT(CONFIG), 4, "uniform")) == [2, 2, 1, 1]
    assert layers_of(partition(GPT(UNTIED), 3)) == [1, 3, 2]  # 17,408 of embeddings, 16,448 of the head, 12,704 a block
    big = GPT(dataclasses.replace(CONFIG, vocab_size=2048))  # an embedding: 5 blocks
    assert layers_of(partition(big, 3)) == [1, 4, 1]
    tokens = torch.zeros(2, 32, dtype=torch.int64)  # a lookup costs nothing, a head does
    ends = layers_of(partition(big, 3, "cost", example=tokens))
    assert ends[0] > 1 and ends[2] == 1 and sum(ends) == 6
    with torch.device("meta"):
        assert layers_of(partition(GPT(big.config), 3, "cost", example=tokens)) == ends


def test_operations_not_parameters_decide_by_cost():
    """A weight that is used on 100 rows costs as one used on 1, and twice as many parameters cost twice as much."""
    sizes = itertools.pairwise((8, 8, 8, 64, 64, 8, 8, 8))
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))
    assert layers_of(partition(model, 2)) == layers_of(partition(model, 2, "cost", example=torch.zeros(3, 8)))
    pooled = nn.Sequential(nn.Linear(8, 8), nn.AdaptiveAvgPool1d(8), *(nn.Linear(8, 8) for _ in range(4)))
    assert sum(layers_of(partition(pooled, 2, "cost", example=torch.zeros(3, 8)))) == 6
    first = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert layers_of(partition(first, 2)) == [1, 2]
    assert layers_of(partition(first, 2, "cost", example=torch.zeros(3, dtype=torch.int64))) == [2, 1]


def test_the_largest_stage_is_as_small_as_can_be():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        costs = torch.randint(1, 20, (7,), generator=generator).tolist()
        for parts in range(1, 8):
            ends = balanced(costs, parts)
            assert len(ends) == parts and ends[-1] == 7 and ends == sorted({*ends})
            assert largest(costs, ends) == min(largest(costs, cut) for cut in cuts(7, parts))


def largest(costs, ends):
    return max(sum(costs[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def cuts(n, parts):
    if parts == 1:
        yield [n]
    for last in range(parts - 1, n) if parts > 1 else ():
        for rest in cuts(last, parts - 1):
            yield [*rest, n]


@pytest.mark.parametrize(("stages", "style", "example", "message"), [
    (7, "parameters", None, "stages=7 of a model of 6 layers"), (0, "uniform", None, "stages=0"),
    (True, "uniform", None, "stages=True"), (2, "even", None, "style='even'"), (2, "cost", None, "without example=")])
def test_bad_input(stages, style, example, message):
    with pytest.raises(ValueError, match=message):
        partition(GPT(CONFIG), stages, style, example=example)


def test_models_whose_layers_are_not_known():
    class Odd(nn.Sequential):
        def forward(self, x):
            return x

    for model in (nn.Linear(2, 2), Odd(nn.Linear(2, 2))):
        with pytest.raises(TypeError, match=f"layers of {type(model).__name__} are not known"):
            partition(model, 1)
    model = HF["llama"]()
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="LlamaForCausalLM has model.extra, which others of its class have not"):
        partition(model, 2)


def test_what_stages_share():
    embedding = {0: "embedding.weight", 2: "head.weight"}
    assert shared(partition(GPT(CONFIG), 3, "uniform")) == [embedding] and shared(partition(GPT(UNTIED), 3)) == []
    assert shared(partition(HF["gpt2"](), 2)) == [{0: "transformer.wte.weight", 1: "lm_head.weight"}]


# --- a stage alone ---------------------------------------------------------------------------------------------------

LARGE = GPTConfig(vocab_size=2048, context_length=64, layers=8, hidden=64, heads=4)


def start(comm, kind, whole):
    """Return (bytes of this rank's parameters, peak bytes on the tracker, and as the allocator reads them). The mutant
    makes the whole model first."""
    def begin():
        sizes = {"vocab_size": 2048, "n_embd": 64, "n_head": 4, "n_layer": 8, "n_positions": 64}
        with torch.device("cpu" if whole else "meta"):
            model = GPT(LARGE) if kind == "gpt" else causal("gpt2", **sizes)()
        return pipeline(model, comm, "1f1b", 4, style="uniform")

    begin()  # what a first call takes besides
    gc.collect()
    with memory.track() as t:
        pipe = begin()
    parameters = sum(p.nbytes for p in pipe.parameters())
    values = all(bool(p.detach().isfinite().all()) for p in pipe.parameters())
    del pipe
    gc.collect()
    with memory.measure() as m:
        kept = begin()
    del kept
    return parameters, values, t.peak.total, m.peak


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_the_whole_model_never_exists_on_a_rank(kind):
    total = sum(p.nbytes for p in GPT(LARGE).parameters())
    for parameters, values, tracked, measured in pooled(start, 4, kind, False):
        assert values and parameters < 0.5 * total
        assert tracked <= parameters * 1.02 and measured <= parameters * 1.05


def test_a_version_that_makes_the_whole_model_fails_here():
    for parameters, _, tracked, measured in pooled(start, 4, "gpt", True):
        assert min(tracked, measured) > parameters * 1.05


def test_a_stage_that_lacks_values_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

        def forward(self, x):
            return x * self.scale

    def made():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), Scale())
        return partition(model, 2)

    with pytest.raises(ValueError, match="scale of Scale has no values"):
        build(made()[1:], "cpu")
    stages = made()
    build(stages[1:], "cpu", lambda module: nn.init.ones_(module.scale) if isinstance(module, Scale) else None)
    assert torch.equal(stages[1][0].scale.detach(), torch.ones(3)) and stages[0][0].weight.is_meta


def test_parameters_that_modules_share_are_one_afterwards():
    with torch.device("meta"):
        model = GPT(CONFIG)
    stages = partition(model, 2)
    build(stages, "cpu", model.initialize)
    assert stages[0].embedding.weight is stages[1].head.weight
