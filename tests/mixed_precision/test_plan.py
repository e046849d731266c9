"""A dtype for each part: its bytes, its borders, and a model that comes back as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.mixed_precision import DynamicPrecisionModel, autocast, plan_bytes, precision_context
from refimpl.mixed_precision.plan import cast, resolve
from refimpl.model import GPT, GPTConfig

BLOCKS_LOW = {"blocks.*": torch.bfloat16}
PLANS = {
    "blocks low": BLOCKS_LOW,
    "blocks low, their norms not": {"*": torch.float32, "blocks.*": torch.bfloat16, "blocks.*.norm?": torch.float32},
    "everything low": {"*": torch.float16},
    "one block": {"blocks.1": torch.bfloat16},
}


def snapshot(model):
    return [(name, p, p.dtype, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()]


def unchanged(model, before):
    return all(p is old and p.dtype is dtype and p.data_ptr() == pointer and torch.equal(p, values)
               for (_, p), (_, old, dtype, pointer, values) in zip(model.named_parameters(), before, strict=True))


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# --- bytes -----------------------------------------------------------------------------------------------------------


def check_bytes(make, model, plan):
    """The tracker's parameters are the closed form, once `make(model, plan)` has run."""
    before = {p: p.dtype for p in model.parameters()}
    expected = plan_bytes(model, plan)
    with memory.track(model) as t:
        made = make(model, plan)
    assert t.now.total - t.now["buffers"] == t.now["parameters"] == expected
    assert expected < sum(p.numel() * dtype.itemsize for p, dtype in before.items())
    return made


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_take_the_bytes_of_their_part(gpt, plan):
    check_bytes(DynamicPrecisionModel, gpt[0], PLANS[plan])


def test_one_that_holds_the_old_values_saves_nothing(small):
    with pytest.raises(AssertionError):
        check_bytes(lambda model, plan: DynamicPrecisionModel(model, plan, keep=True), small[0], BLOCKS_LOW)


def test_the_closed_form_counts_each_parameter_once():
    model = GPT(GPTConfig(vocab_size=64, context_length=32, layers=2, hidden=32, heads=4))
    blocks = sum(p.numel() for block in model.blocks for p in block.parameters())
    assert plan_bytes(model, BLOCKS_LOW) == 4 * model.config.parameter_count() - 2 * blocks
    assert plan_bytes(model, {}) == 4 * model.config.parameter_count()


# --- dtypes and borders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_in_the_dtypes_of_the_plan(gpt, plan):
    model, tokens = gpt
    expected = model(tokens, tokens)
    with precision_context(model, PLANS[plan]):
        loss = model(tokens, tokens)
        loss.backward()
        assert all(p.grad.dtype is p.dtype for p in model.parameters())
        assert {p.dtype for p in model.blocks[1].mlp.parameters()} <= {torch.bfloat16, torch.float16}
    assert model.config.dropout or abs(loss - expected) < 0.05


def test_what_is_cast_and_where(small, dtypes):
    """Embeddings and head in fp32, blocks low: two casts of activations forward, wherever the parts meet."""
    model, tokens = small
    with precision_context(model, BLOCKS_LOW), dtypes() as record:
        model(tokens, tokens)
    assert [line for line in record.casts if line[1] == "(2, 32, 32)"] == [
        ("aten::_to_copy", "(2, 32, 32)", "torch.bfloat16"), ("aten::_to_copy", "(2, 32, 32)", "torch.float32")]
    assert len(record.casts) == 2
    products = [dtype for name, _, dtype in record.forward if name == "aten::addmm"]
    assert products == ["torch.bfloat16"] * 8
    assert next(dtype for name, _, dtype in record.forward if name == "aten::embedding") == "torch.float32"


def test_later_lines_outrank_and_children_inherit():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    plan = {"a": torch.bfloat16, "a.1": torch.float16}
    low = torch.bfloat16
    assert resolve(model, plan) == {"": None, "a": low, "a.0": low, "a.1": torch.float16, "b": None}
    assert resolve(model, {"a.1": torch.float16, "*": torch.float32})["a.1"] is torch.float32


def test_what_patterns_match():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "Head": nn.Linear(2, 2)})
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    paths = ["", "blocks", "blocks.0", "blocks.1", "Head"]
    for plan, expected in (
        ({"*": low}, [low] * 5),
        ({"": low}, [low] * 5),  # the model itself, and from it everything inside
        ({"": low, "blocks": full}, [low, full, full, full, low]),
        ({"blocks": low}, [None, low, low, low, None]),
        ({"blocks.*": low}, [None, None, low, low, None]),
        ({"blocks.?": low, "blocks.[1]": half}, [None, None, low, half, None]),
        ({"*.1": low}, [None, None, None, low, None]),
        ({"*e*": low, "blocks.1": full}, [None, None, None, full, low]),
        ({"*": low, "blocks": full}, [low, full, low, low, low]),  # the children have the first line as their own
    ):
        assert [resolve(model, plan)[path] for path in paths] == expected, plan
    with pytest.raises(ValueError, match=r"plan\['head'\] matches no module"):
        resolve(model, {"head": low})


def test_short_names_stand_for_dtypes(small):
    model, _ = small
    named = {"*": torch.float32, "blocks.*": torch.bfloat16, "blocks.*.norm?": torch.float16}
    short = {"*": "fp32", "blocks.*": "bf16", "blocks.*.norm?": "fp16"}
    assert resolve(model, short) == resolve(model, named) and plan_bytes(model, short) == plan_bytes(model, named)
    with DynamicPrecisionModel(model, short) as dynamic:
        assert dynamic.plan == named
        dynamic.plan = {"*": "fp16"}
        assert dynamic.plan == {"*": torch.float16}
    with precision_context(model, "bf16"):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_arguments_of_every_kind_are_cast():
    x = torch.ones(2)
    tree = {"a": [x, (x.double(), torch.tensor(1))], "b": torch.return_types.max((x, x.long())), "c": "text"}
    out = cast(tree, torch.float16)
    assert out["a"][0].dtype is torch.float16 and out["a"][1][0].dtype is torch.float64
    assert out["a"][1][1].dtype is torch.int64 and out["c"] == "text"
    model = nn.ModuleDict({"part": Keywords()})
    with precision_context(model, {"part": torch.float16}):
        assert model["part"](x, scale=x).dtype is torch.float16


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, *, scale):
        assert x.dtype is scale.dtype is self.weight.dtype
        return x * scale * self.weight


def test_under_autocast_and_under_checkpointing(small):
    model, tokens = small
    with precision_context(model, BLOCKS_LOW), autocast():
        model(tokens, tokens).backward()
    x = torch.randn(2, 32, 32, requires_grad=True)
    with precision_context(model, BLOCKS_LOW):
        torch.utils.checkpoint.checkpoint(model.blocks[0], x, use_reentrant=False).sum().backward()
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", [lambda low: {"*": low}, lambda low: {"0": low, "1": low}])
def test_batch_norm_keeps_its_statistics_and_parameters_in_fp32(plan, low):
    """As under torch.autocast: the convolution runs low, BatchNorm takes its output as it is and sums in fp32."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 8, 8)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", low):
        expected = reference(x)
    before = snapshot(model)
    assert plan_bytes(model, plan(low)) == 2 * (4 * 3 * 9 + 4) + 4 * (4 + 4)
    with precision_context(model, plan(low)):
        found = model(x)
        found.float().sum().backward()
        assert {p.dtype for p in model[0].parameters()} == {low} and found.dtype is low
        assert {t.dtype for t in (*model[1].parameters(), model[1].running_mean)} == {torch.float32}
        model.eval()(x)
    assert torch.allclose(found.float(), expected.float(), atol=0.05)
    assert torch.equal(model[1].running_mean, reference[1].running_mean) and unchanged(model, before)


def test_parameters_of_integers_stay():
    model = nn.ParameterDict({"w": torch.ones(3), "i": nn.Parameter(torch.arange(3), requires_grad=False)})
    assert plan_bytes(model, {"*": torch.bfloat16}) == 2 * 3 + 8 * 3
    with precision_context(model, torch.bfloat16):
        assert (model["w"].dtype, model["i"].dtype) == (torch.bfloat16, torch.int64)


def test_a_norm_without_fp32_statistics_is_made_low_as_anything_else():
    for norm in (nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4, affine=True), nn.LayerNorm(4)):
        with precision_context(norm, torch.bfloat16):
            assert {p.dtype for p in norm.parameters()} == {torch.bfloat16}
            assert norm(torch.randn(2, 4, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize("plan", [torch.float32, torch.float16])
def test_statistics_of_16_bits_are_taken_in_their_own_type_alone(plan):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).bfloat16()
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"^1 keeps running statistics in torch.bfloat16, and the plan wants {plan}: "
                                         "make the BatchNorm2d fp32 first"):
        DynamicPrecisionModel(model, {"*": plan})
    assert unchanged(model, before) and not hooks(model)
    with precision_context(model, torch.bfloat16):
        assert model(torch.randn(2, 3, 8, 8)).dtype is torch.bfloat16
    model[1].float()
    with precision_context(model, torch.float16):
        assert model(torch.randn(2, 3, 8, 8)).dtype is torch.float16


# --- the way back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_context_leaves_the_model_as_it_was(gpt, plan):
    model, tokens = gpt
    before = snapshot(model)
    with precision_context(model, PLANS[plan]):
        model(tokens, tokens).backward()
    assert unchanged(model, before) and not hooks(model)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    model.zero_grad()
    model(tokens, tokens).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_also_after_an_exception_and_with_one_dtype(small):
    model, _ = small
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), precision_context(model, torch.bfloat16) as same:
        assert same is model and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        raise ZeroDivisionError
    assert unchanged(model, before) and not hooks(model)


def test_what_was_trained_inside_is_kept():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.001, 1.001]]))
    with precision_context(model, torch.bfloat16), torch.no_grad():
        model.weight[0, 0] = 3.0
    assert model.weight.tolist() == [[3.0, pytest.approx(1.001, abs=1e-6)]]


def test_contexts_nest(small):
    model, tokens = small
    before = snapshot(model)
    with precision_context(model, BLOCKS_LOW):
        with precision_context(model, torch.float32):
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            model(tokens)
        assert model.blocks[0].mlp.up.weight.dtype is torch.bfloat16
        model(tokens)
    assert unchanged(model, before)


def test_a_dynamic_model_changes_its_plan_and_is_restored(small):
    model, tokens = small
    reference = copy.deepcopy(model)
    with DynamicPrecisionModel(model, BLOCKS_LOW) as dynamic:
        optimizer = torch.optim.AdamW(dynamic.parameters(), lr=1e-3)
        low = dynamic(tokens, tokens)
        low.backward()
        optimizer.step()
        assert dynamic.plan == BLOCKS_LOW
        dynamic.plan = {"blocks.0": torch.bfloat16}
        assert model.blocks[1].mlp.up.weight.dtype is torch.float32
        with pytest.raises(ValueError, match="matches no module"):
            dynamic.plan = {"nothing": torch.bfloat16}
        assert dynamic.plan == {"blocks.0": torch.bfloat16} and hooks(model)
        dynamic.zero_grad()
        assert dynamic(tokens, tokens) < low
    assert not hooks(model) and dynamic.plan is None and dynamic.restore() is model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.allclose(model.blocks[0].mlp.up.weight, reference.blocks[0].mlp.up.weight, atol=5e-3)
    before = snapshot(reference)
    kept = DynamicPrecisionModel(reference, BLOCKS_LOW, keep=True)
    assert unchanged(kept.restore(), before)  # it held the old values; the other's were rounded


# --- bad input -------------------------------------------------------------------------------------------------------


def test_plans_that_cannot_be(small):
    model, _ = small
    before = snapshot(model)
    for make in (lambda plan: precision_context(model, plan).__enter__(),
                 lambda plan: DynamicPrecisionModel(model, plan)):
        for plan, error, message in (
            ({"blocks.9": torch.bfloat16}, ValueError, r"plan\['blocks.9'\] matches no module: this model has embed"),
            ({"blocks.*": torch.int8}, ValueError, r"plan\['blocks.\*'\]=torch.int8: expected torch.float32, "),
            ({"blocks.*": torch.float64}, ValueError, r"plan\['blocks.\*'\]=torch.float64: expected"),
            ({"blocks.*": "int8"}, ValueError, r"plan\['blocks.\*'\]='int8': expected .* or 'fp32', 'bf16', 'fp16'"),
            ([("blocks.*", torch.bfloat16)], TypeError, "expected a mapping of patterns to dtypes"),
            ({"head": torch.bfloat16, "embedding": torch.float32}, ValueError,
             "embedding.weight and head.weight are one parameter, and the plan wants it in torch.float32 and in "
             "torch.bfloat16: give both"),
        ):
            with pytest.raises(error, match=message):
                make(plan)
            assert unchanged(model, before) and not hooks(model)


def test_an_option_that_nobody_knows_is_named_beside_the_known(small):
    model, _ = small
    before = snapshot(model)
    with pytest.raises(TypeError, match="DynamicPrecisionModel has no option 'kept': expected model, plan, keep$"):
        DynamicPrecisionModel(model, {"*": torch.bfloat16}, kept=True)
    assert unchanged(model, before) and not hooks(model)


def test_a_model_with_a_plan_is_copied_and_pickled(small):
    model, tokens = small
    dynamic = DynamicPrecisionModel(model, {"*": torch.bfloat16})
    expected = dynamic(tokens)
    for other in (copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))):
        assert torch.equal(other(tokens), expected)
        assert other.restore()(tokens).dtype is torch.float32
    assert torch.equal(dynamic(tokens), expected)
