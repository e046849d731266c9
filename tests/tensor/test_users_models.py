"""What users' models do that ours do not: shared weights, layers of their own, hooks, dropout in odd places, two
forwards before a backward, weights that are trained later."""

import contextlib
import copy

import pytest
import torch
from rank_pool import alike, on_ranks, pooled
from tensor_kit import SPLITS, bodies, farthest, tokens_of, twins, whole
from torch import nn
from torch.nn.functional import dropout
from users_kit import Model

from refimpl.checkpointing import recompute
from refimpl.comm import FakeCommunicator
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import tensor_parallel
from refimpl.tensor.conjugate import enter, enter_sequence, leave, leave_sequence
from refimpl.tensor.split_plan import Column, Row

PLAN = {"up": "column", "down": "row"}


class MLP(nn.Module):
    """Dropout before, within and after the split part; `masks` are those of the last forward."""

    def __init__(self, up=nn.Linear):
        super().__init__()
        self.up, self.down = up(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = dropout(torch.ones(64), 0.5, self.training)
        y = dropout(self.up(x.view(16, 4)).detach() * 0 + 1, 0.5, self.training)
        self.masks = x, y, dropout(self.down(y).detach() * 0 + 1, 0.5, self.training)
        return x


# --- what is refused -------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(("up", "name"), [(Doubled, "Doubled"), (
    lambda *sizes: nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)), "ParametrizedLinear")])
def test_a_layer_that_computes_something_else_is_refused(up, name):
    with pytest.raises(TypeError, match=f"up is of {name}: expected an nn.Linear"):
        tensor_parallel(MLP(up), FakeCommunicator(0, 2), PLAN)


@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "other": "column"}])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_weight_of_two_layers_is_refused(what, plan):
    model = MLP()
    model.other = nn.Linear(4, 4)
    setattr(model.other, what, getattr(model.up, what))
    with pytest.raises(ValueError, match="up and other share a weight"):
        tensor_parallel(model, FakeCommunicator(0, 2), plan)


def test_a_layer_in_two_places_is_refused():
    model = MLP()
    model.other = model.up
    with pytest.raises(ValueError, match="up and other share a weight"):
        tensor_parallel(model, FakeCommunicator(0, 2), PLAN)


def test_two_styles_of_one_module_are_refused():
    with pytest.raises(ValueError, match="up: the plan's 'u[*]' says Row.*, and another of its names Column"):
        tensor_parallel(MLP(), FakeCommunicator(0, 2), {"up": "column", "u*": "row"})


@pytest.mark.parametrize(("model", "plan", "text"), [
    (MLP(), {"up": "column", "down": Row(3)}, "down: 4 features in 3 heads"),
    (GPT(GPTConfig(vocab_size=3, context_length=8, layers=1, hidden=8, heads=4, tied=False)), None,
     "embedding.weight: 3 rows cannot be split over 4 ranks")])
def test_a_refusal_leaves_the_model_whole(model, plan, text):
    before = [(name, type(module), id(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=text):
        tensor_parallel(model, FakeCommunicator(0, 4), plan)
    assert [(name, type(module), id(module)) for name, module in model.named_modules()] == before


@pytest.mark.parametrize("split", SPLITS)
def test_a_model_is_split_once(split):
    model = SPLITS[split](whole("llama"), FakeCommunicator(0, 2))
    with pytest.raises(ValueError, match="LlamaForCausalLM is split already: expected a whole model"):
        SPLITS[split](model, FakeCommunicator(0, 2))


def test_a_copy_would_lose_what_it_is_a_part_of():
    model = tensor_parallel(MLP(), FakeCommunicator(0, 2), PLAN)
    with pytest.raises(TypeError, match="copy the model before it is split, and split the copy, too"):
        copy.deepcopy(nn.Sequential(model))


def with_head_norms():
    """A norm of each head, as Qwen3 and Gemma 3 have."""
    return Model(lambda self, x: self.down(self.norm(self.up(x).unflatten(-1, (-1, 2))).flatten(-2)),
                 up=nn.Linear(4, 8), norm=nn.RMSNorm(2), down=nn.Linear(8, 4))


def of_heads(comm, style, trained_later):
    """How far the gradient of the norm is from the whole model's."""
    torch.manual_seed(0)
    model, x = with_head_norms().double(), torch.randn(5, 4, dtype=torch.float64)
    model.norm.requires_grad_(not trained_later)
    whole = copy.deepcopy(model).requires_grad_()
    tensor_parallel(model, comm, {"up": Column(heads=(4,)), "down": Row(4), **style}).requires_grad_()
    for each in (whole, model):
        each(x).square().sum().backward()
    return (model.norm.weight.grad - whole.norm.weight.grad).abs().max().item()


@pytest.mark.parametrize("trained_later", [False, True])
@pytest.mark.parametrize("name", ["whole", "replicated_with_grad_allreduce"])
def test_a_norm_of_each_head_sums_its_gradient(name, trained_later):
    assert max(pooled(of_heads, 2, {"norm": name}, trained_later)) < 1e-12
    assert min(pooled(of_heads, 2, {}, trained_later)) > 1e-3, "the mutant that does not"


@pytest.mark.parametrize("what", ["shape", "dtype", "one more", "meta"])
@on_ranks(2, fails=r"ranks \[1\] have another model than rank 0")
def test_other_buffers_on_other_ranks_are_named(comm, what):
    model = MLP()
    model.register_buffer("table", torch.zeros(3 + comm.rank * (what == "shape")))
    if comm.rank:
        model = model.double() if what == "dtype" else model.to("meta") if what == "meta" else model
        if what == "one more":
            model.register_buffer("more", torch.zeros(2))
    tensor_parallel(model, comm, PLAN)


# --- what is kept ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_every_rank_gets_the_buffers_of_rank_0(comm):
    model = MLP()
    model.register_buffer("table", torch.full((3,), comm.rank + 5.0))
    assert tensor_parallel(model, comm, PLAN).table.tolist() == [5.0] * 3


def test_hooks_and_evaluation_are_kept():
    model, calls = MLP().eval(), []
    hooks = [layer.register_forward_hook(lambda *_, name=name: calls.append(name))
             for name, layer in model.named_children()]
    tensor_parallel(model, FakeCommunicator(0, 1), PLAN)(None)
    assert calls == ["up", "down"] and not any(module.training for module in model.modules())
    hooks[0].remove()
    model(None)
    assert calls == ["up", "down", "down"]


def test_a_key_head_on_several_ranks_names_them_as_ranks_of_the_world():
    mesh = Mesh(dp=2, tp=2).connect(FakeCommunicator(3, 4))
    config = GPTConfig(vocab_size=8, context_length=8, layers=1, hidden=8, heads=4, kv_heads=1)
    model = tensor_parallel(GPT(config), mesh.get_parallel_group("tp"))
    qkv = model.blocks[0].attention.qkv
    assert [p.shard_spec.replicas for p in (*qkv.weights, *qkv.biases)] == [(), (2, 3), (2, 3)] * 2
    assert model.blocks[0].norm1.weight.shard_spec.replicas == (2, 3)


# --- random numbers, recomputation, weights that are trained later ---------------------------------------------------


@on_ranks(2)
def test_dropout_agrees_before_and_after_the_split_part_of_a_module(comm):
    torch.manual_seed(0)
    model = tensor_parallel(nn.Sequential(MLP()), comm, {f"0.{name}": style for name, style in PLAN.items()})
    model(None)
    before, within, after = model[0].masks
    assert alike(comm, before) and alike(comm, after) and not alike(comm, within)


class Listed(MLP):
    """Has its layer in a list, which nobody calls."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList([self._modules.pop("up")])

    @property
    def up(self):
        return self.ups[0]


@on_ranks(2)
def test_dropout_agrees_where_a_layer_is_in_a_list(comm):
    torch.manual_seed(0)
    model = tensor_parallel(Listed(), comm, {"ups.0": "column", "down": "row"})
    model(None)
    _, within, after = model.masks
    assert alike(comm, after) and not alike(comm, within)


def recomputed(model, how):
    if how == "ours":
        return recompute(bodies(model))
    model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    return contextlib.nullcontext()


@pytest.mark.parametrize(("shape", "evaluation"), [((4, 4), False), ((1, 5), False), ((4, 4), True)])
@pytest.mark.parametrize("how", ["ours", "reentrant", "not reentrant"])
@pytest.mark.parametrize("split", SPLITS)
@on_ranks(2)
def test_a_block_is_recomputed_with_the_tokens_of_its_own_forward(comm, split, how, shape, evaluation):
    """If another forward comes before backward."""
    model, reference, _ = twins("llama")
    SPLITS[split](model, comm)
    for each in (reference.train(), model.train()):
        with recomputed(each, how) if each is model else contextlib.nullcontext():
            loss = each(input_ids=tokens_of(each, 2, 8), use_cache=False).logits.square().mean()
            with torch.set_grad_enabled(not evaluation):
                other = each(input_ids=tokens_of(each, *shape, 1), use_cache=False).logits.square().mean()
            (loss + other).backward()
    assert farthest(model.parameters(), reference) <= 1e-12


@pytest.mark.parametrize("split", SPLITS)
@on_ranks(2)
def test_weights_that_are_frozen_at_first(comm, split):
    model, reference, tokens = twins("gpt")
    for p in model.parameters():
        p.requires_grad_(p.dim() > 1)
    SPLITS[split](model, comm)
    frozen = [p for p in model.parameters() if p.dim() == 1]
    assert not any(p.requires_grad for p in frozen)
    for each in (reference, model.requires_grad_()):
        each(tokens, tokens).backward()
    assert farthest(frozen, reference) <= 1e-12


@on_ranks(2)
def test_random_numbers_behind_the_last_norm_agree(comm):
    """A classifier has dropout there."""
    model, seen = SPLITS["sequence"](whole("gpt").train(), comm), []
    model.head.register_forward_pre_hook(lambda *_: seen.append(torch.get_rng_state()))
    model(tokens_of(model))
    assert alike(comm, seen[0])


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"num_items_in_batch": 10}])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@on_ranks(2)
def test_labels_are_scored_with_the_options_of_transformers(comm, name, options):
    model, reference, tokens = twins(name)
    tensor_parallel(model, comm, loss_parallel=True)
    labels = tokens.masked_fill(tokens % 3 == 0, options.get("ignore_index", -100))
    expected, found = (each(input_ids=tokens, labels=labels, **options).loss.item() for each in (reference, model))
    assert found == pytest.approx(expected, rel=1e-6)


@on_ranks(2, fails=r"ranks \[1\] have another model than rank 0")
def test_other_plans_on_other_ranks_are_named(comm):
    tensor_parallel(MLP(), comm, {"up": "column"} if comm.rank else PLAN)


@on_ranks(2)
def test_a_gpt_sums_losses_too(comm):
    model, reference, tokens = twins("gpt")
    tensor_parallel(model, comm)
    expected, found = (each(tokens, tokens, reduction="sum").item() for each in (reference, model))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["enter", "leave", "enter_sequence", "leave_sequence"])
@on_ranks(2)
def test_second_derivatives_are_an_error(comm, name):
    """Those of what goes between ranks have no graph."""
    x = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    y = {"enter": lambda: enter(x, comm), "leave": lambda: leave(x * 1, comm),
         "enter_sequence": lambda: enter_sequence(x, comm, torch.Size((1, 4))),
         "leave_sequence": lambda: leave_sequence(x * 1, comm)}[name]()
    first, = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
