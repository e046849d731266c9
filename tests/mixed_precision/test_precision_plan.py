"""A dtype for each part: its bytes, its borders, and a model that comes back as it was."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from precision_kit import Dtypes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl import memory
from refimpl.mixed_precision import DynamicPrecisionModel, autocast, plan_bytes, precision_context
from refimpl.mixed_precision.precision_plan import cast, resolve

LOW, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
BLOCKS_LOW = {"blocks.*": LOW}
PLANS = {
    "blocks low": BLOCKS_LOW, "everything low": {"*": HALF}, "one block": {"blocks.1": LOW},
    "blocks low, their norms not": {"*": FULL, "blocks.*": LOW, "blocks.*.norm?": FULL}}


@contextmanager
def unchanged(model):
    """Afterwards the model has the same parameters, in the same memory, with the same values; and no hook is left."""
    before = [(p, p.dtype, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    yield
    for p, (old, dtype, pointer, values) in zip(model.parameters(), before, strict=True):
        assert p is old and p.dtype is dtype and p.data_ptr() == pointer and torch.equal(p, values)
    assert not hooks(model)


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def check_bytes(make, model, plan):
    """The tracker's parameters are the closed form, once `make(model, plan)` has run."""
    before, expected = {p: p.dtype for p in model.parameters()}, plan_bytes(model, plan)
    with memory.track(model) as t:
        made = make(model, plan)  # lives as long as the bytes are read
    assert t.now.total - t.now["buffers"] == t.now["parameters"] == expected
    assert expected < sum(p.numel() * dtype.itemsize for p, dtype in before.items())
    return made


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_take_the_bytes_of_their_part(gpt, plan):
    check_bytes(DynamicPrecisionModel, gpt[0], PLANS[plan])


def test_one_that_holds_the_old_values_saves_nothing(model):
    with pytest.raises(AssertionError):
        check_bytes(lambda model, plan: DynamicPrecisionModel(model, plan, keep=True), model, BLOCKS_LOW)


def test_the_closed_form_counts_each_parameter_once(model):
    blocks = sum(p.numel() for block in model.blocks for p in block.parameters())
    assert plan_bytes(model, BLOCKS_LOW) == 4 * model.config.parameter_count() - 2 * blocks
    assert plan_bytes(model, {}) == 4 * model.config.parameter_count()


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


def test_what_is_cast_and_where(model, tokens):
    """Embeddings and head in fp32, blocks low: two casts of activations forward, wherever the parts meet."""
    with precision_context(model, BLOCKS_LOW), Dtypes() as record:
        model(tokens, tokens)
    assert record.casts == [("aten::_to_copy", "(2, 32, 32)", f"torch.{dtype}") for dtype in ("bfloat16", "float32")]
    assert [dtype for name, _, dtype in record.forward if name == "aten::addmm"] == ["torch.bfloat16"] * 8
    assert next(dtype for name, _, dtype in record.forward if name == "aten::embedding") == "torch.float32"


def test_later_lines_outrank_and_children_inherit():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    assert resolve(model, {"a": LOW, "a.1": HALF}) == {"": None, "a": LOW, "a.0": LOW, "a.1": HALF, "b": None}
    assert resolve(model, {"a.1": HALF, "*": torch.float32})["a.1"] is torch.float32


def test_what_patterns_match():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "Head": nn.Linear(2, 2)})
    for plan, expected in (
        ({"*": LOW}, [LOW] * 5), ({"": LOW}, [LOW] * 5),  # the model itself, and from it everything inside
        ({"": LOW, "blocks": FULL}, [LOW, FULL, FULL, FULL, LOW]), ({"blocks": LOW}, [None, LOW, LOW, LOW, None]),
        ({"blocks.*": LOW}, [None, None, LOW, LOW, None]), ({"*.1": LOW}, [None, None, None, LOW, None]),
        ({"blocks.?": LOW, "blocks.[1]": HALF}, [None, None, LOW, HALF, None]),
        ({"*e*": LOW, "blocks.1": FULL}, [None, None, None, FULL, LOW]),
        ({"*": LOW, "blocks": FULL}, [LOW, FULL, LOW, LOW, LOW])):  # the children have the first line as their own
        assert [resolve(model, plan)[path] for path in ("", "blocks", "blocks.0", "blocks.1", "Head")] == expected, plan
    with pytest.raises(ValueError, match=r"plan\['head'\] matches no module"):
        resolve(model, {"head": LOW})


def test_short_names_stand_for_dtypes(model):
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
    assert [each.dtype for each in (out["a"][0], *out["a"][1])] == [torch.float16, torch.float64, torch.int64]
    assert out["c"] == "text"
    class Keywords(nn.Linear):
        def forward(self, x, *, scale):
            assert x.dtype is scale.dtype is self.weight.dtype
            return x * scale * self.weight

    model = nn.ModuleDict({"part": Keywords(2, 1)})
    with precision_context(model, {"part": torch.float16}):
        assert model["part"](x, scale=x).dtype is torch.float16


def test_under_autocast_and_under_checkpointing(model, tokens):
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
    assert plan_bytes(model, plan(low)) == 2 * (4 * 3 * 9 + 4) + 4 * (4 + 4)
    with unchanged(model), precision_context(model, plan(low)):
        found = model(x)
        found.float().sum().backward()
        assert {p.dtype for p in model[0].parameters()} == {low} and found.dtype is low
        assert {t.dtype for t in (*model[1].parameters(), model[1].running_mean)} == {torch.float32}
        model.eval()(x)
    assert torch.allclose(found.float(), expected.float(), atol=0.05)
    assert torch.equal(model[1].running_mean, reference[1].running_mean)


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
    told = f"^1 keeps running statistics in torch.bfloat16, and the plan wants {plan}: make the BatchNorm2d fp32 first"
    with unchanged(model), pytest.raises(ValueError, match=told):
        DynamicPrecisionModel(model, {"*": plan})
    with precision_context(model, torch.bfloat16):
        assert model(torch.randn(2, 3, 8, 8)).dtype is torch.bfloat16
    model[1].float()
    with precision_context(model, torch.float16):
        assert model(torch.randn(2, 3, 8, 8)).dtype is torch.float16


@pytest.mark.parametrize("plan", PLANS)
def test_a_context_leaves_the_model_as_it_was(gpt, plan):
    model, tokens = gpt
    with unchanged(model), precision_context(model, PLANS[plan]):
        model(tokens, tokens).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    model.zero_grad()
    model(tokens, tokens).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_also_after_an_exception_and_with_one_dtype(model):
    with unchanged(model), pytest.raises(ZeroDivisionError), precision_context(model, torch.bfloat16) as same:
        assert same is model and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        raise ZeroDivisionError


class Full(TorchDispatchMode):
    """Has no room for the second cast."""

    casts = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.casts += function is torch.ops.aten._to_copy.default
        if self.casts == 2:
            raise torch.OutOfMemoryError("no room")
        return function(*args, **kwargs or {})


def test_a_plan_without_room_changes_nothing_and_its_error_holds_no_old_values():
    """A notebook keeps the last error, and with it what the functions in its traceback hold."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with unchanged(model), pytest.raises(torch.OutOfMemoryError) as caught, Full():
        DynamicPrecisionModel(model, {"*": LOW}, keep=True)
    old = StorageWeakRef(model[0].weight.untyped_storage())
    assert not old.expired()
    DynamicPrecisionModel(model, {"*": LOW})
    assert caught.tb and old.expired()


def test_what_was_trained_inside_is_kept():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.001)
    with precision_context(model, torch.bfloat16), torch.no_grad():
        model.weight[0, 0] = 3.0
    assert model.weight.tolist() == [[3.0, pytest.approx(1.001, abs=1e-6)]]


def test_contexts_nest(model, tokens):
    with unchanged(model), precision_context(model, BLOCKS_LOW):
        with precision_context(model, torch.float32):
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            model(tokens)
        assert model.blocks[0].mlp.up.weight.dtype is torch.bfloat16
        model(tokens)


def test_a_dynamic_model_changes_its_plan_and_is_restored(model, tokens):
    reference = copy.deepcopy(model)
    with DynamicPrecisionModel(model, BLOCKS_LOW) as dynamic:
        optimizer, low = torch.optim.AdamW(dynamic.parameters(), lr=1e-3), dynamic(tokens, tokens)
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
    with unchanged(reference):  # it holds the old values; the other's were rounded
        assert DynamicPrecisionModel(reference, BLOCKS_LOW, keep=True).restore() is reference


def test_plans_that_cannot_be(model):
    for make in (lambda plan: precision_context(model, plan).__enter__(),
                 lambda plan: DynamicPrecisionModel(model, plan)):
        for plan, error, message in (
            ({"blocks.9": torch.bfloat16}, ValueError, r"plan\['blocks.9'\] matches no module: this model has embed"),
            ({"blocks.*": torch.int8}, ValueError, r"plan\['blocks.\*'\]=torch.int8: expected torch.float32, "),
            ({"blocks.*": torch.float64}, ValueError, r"plan\['blocks.\*'\]=torch.float64: expected"),
            ({"blocks.*": "int8"}, ValueError, r"plan\['blocks.\*'\]='int8': expected .* or 'fp32', 'bf16', 'fp16'"),
            ([("blocks.*", torch.bfloat16)], TypeError, "expected a mapping of patterns to dtypes"),
            ({"head": torch.bfloat16, "embedding": torch.float32}, ValueError, "embedding.weight and head.weight are "
             "one parameter, and the plan wants it in torch.float32 and in torch.bfloat16: give both")):
            with unchanged(model), pytest.raises(error, match=message):
                make(plan)


def test_an_option_that_nobody_knows_is_named_beside_the_known(model):
    told = "DynamicPrecisionModel has no option 'kept': expected model, plan, keep$"
    with unchanged(model), pytest.raises(TypeError, match=told):
        DynamicPrecisionModel(model, {"*": torch.bfloat16}, kept=True)


def test_a_model_with_a_plan_is_copied_and_pickled(model, tokens):
    dynamic = DynamicPrecisionModel(model, {"*": torch.bfloat16})
    expected = dynamic(tokens)
    for other in (copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))):
        assert torch.equal(other(tokens), expected) and other.restore()(tokens).dtype is torch.float32
    assert torch.equal(dynamic(tokens), expected)
