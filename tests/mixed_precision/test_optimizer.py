"""The optimizer with fp32 masters: its bytes, its arithmetic, and everything that one expects of an optimizer."""

import copy
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from users_kit import closure_of

from refimpl import memory
from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer, step_bytes
from refimpl.mixed_precision.masters import buckets

SGD = partial(torch.optim.SGD, lr=1.0)
LOW = [torch.bfloat16, torch.float16]


def wrapped(model, dtype=torch.bfloat16, inner=None, **options):
    return MixedPrecisionOptimizer((inner or torch.optim.AdamW)(model.parameters(), lr=1e-3), dtype, **options)


def ones(n, count=1, inner=SGD, **options):
    """(`count` parameters of `n` ones, the optimizer that wraps `inner` of them). Gradients are ones, too."""
    parameters = [nn.Parameter(torch.ones(n)) for _ in range(count)]
    optimizer = MixedPrecisionOptimizer(inner(parameters), **options)
    for p in parameters:
        p.grad = torch.ones_like(p)
    return parameters, optimizer


def step(model, optimizer, tokens, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()


def weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def masters(optimizer):
    return [optimizer.state[p]["master"] for p in weights(optimizer)]


def same(some, others):
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def agree(optimizer):
    """Whether every weight is its master, rounded."""
    return same([m.to(p.dtype) for m, p in zip(masters(optimizer), weights(optimizer), strict=True)],
                weights(optimizer))


# --- bytes -----------------------------------------------------------------------------------------------------------

def check_bytes(model, tokens, make, precision):
    """Two steps of what `make` wraps: the tracker and the allocator read the closed form of `precision`."""
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    expected = memory.model_state_bytes(count, "adamw", precision, tensors)
    with memory.track() as t:
        optimizer = make(model)
        step(model, optimizer, tokens, 2)
    assert {name: t.now[name] for name in expected} == dict(expected)
    states = sum(t.now[name] for name in ("parameters", "gradients", "optimizer state"))
    assert states == expected.total == t.now.total - t.now["inputs"] - t.now["buffers"]
    optimizer.zero_grad()
    with memory.measure("cpu") as m:
        step(model, optimizer, tokens)
    assert m.net == expected["gradients"]  # the gradients are new, everything else was there
    return expected.total, count, tensors


@pytest.mark.parametrize(("fp32_gradients", "precision", "each"), [
    (False, "bf16 + fp32 master", 16), (True, "bf16 + fp32 master and gradients", 18)])
@pytest.mark.parametrize("dtype", LOW)
def test_sixteen_and_eighteen_bytes_a_parameter(gpt, fp32_gradients, precision, each, dtype):
    total, count, tensors = check_bytes(*gpt, partial(wrapped, dtype=dtype, fp32_gradients=fp32_gradients), precision)
    assert total == each * count + 4 * tensors


def no_master(inner):
    """The mutant that saves too much: 16-bit weights, and everything else as low."""
    for p in inner.param_groups[0]["params"]:
        p.data = p.data.bfloat16()
    return inner


class TwoMasters(MixedPrecisionOptimizer):
    """The mutant that saves too little: a second fp32 copy."""

    def step(self, closure=None):
        for p in weights(self):  # AdamW fills an empty state only
            self.inner.state[self._masters[p]].pop("again", None)
        super().step(closure)
        for p in weights(self):
            self.inner.state[self._masters[p]]["again"] = self._masters[p].detach().clone()


class KeepsWideGradients(MixedPrecisionOptimizer):
    """The mutant that forgets to let the fp32 gradients of its masters go."""

    def step(self, closure=None):
        super().step(closure)
        for p in weights(self):
            self._masters[p].grad = p.grad.float()


@pytest.mark.parametrize("mutant", [no_master, TwoMasters, KeepsWideGradients])
def test_the_byte_test_sees_other_numbers_of_copies(model, tokens, mutant):
    with pytest.raises(AssertionError):
        check_bytes(model, tokens, lambda it: mutant(torch.optim.AdamW(it.parameters(), lr=1e-3)), "bf16 + fp32 master")


@pytest.mark.parametrize("bucket_bytes", [2**12, 2**25, None])
def test_a_step_takes_one_bucket_of_fp32_gradients(model, tokens, bucket_bytes):
    optimizer = wrapped(model, inner=torch.optim.SGD, bucket_bytes=bucket_bytes)
    model(tokens, tokens).backward()
    with memory.track(model, optimizer) as t:
        optimizer.step()
    sizes = [p.numel() for p in model.parameters()]
    assert t.peak.total - t.start.total == t.peak["gradients"] - t.start["gradients"] == step_bytes(sizes, bucket_bytes)
    assert (t.peak.total - t.start.total == 4 * sum(sizes)) == (bucket_bytes != 2**12)


def test_fp32_gradients_are_lent_and_not_copied(model, tokens):
    optimizer = wrapped(model, inner=torch.optim.SGD, fp32_gradients=True)
    model(tokens, tokens).backward()
    assert all(p.grad.dtype is torch.float32 and p.dtype is torch.bfloat16 for p in model.parameters())
    with memory.track(model, optimizer) as t:
        optimizer.step()
    assert t.peak.total == t.start.total


def test_buckets():
    assert list(buckets([1, 2, 3], None, lambda n: n)) == [[1, 2, 3]]
    assert list(buckets([4, 4, 9, 1, 1], 8, lambda n: n)) == [[4, 4], [9], [1, 1]]
    assert list(buckets([], 8, lambda n: n)) == []
    assert step_bytes([1, 1, 3, 1], 8) == 12 and step_bytes([5, 5], None) == 40 and step_bytes([]) == 0


# --- arithmetic ------------------------------------------------------------------------------------------------------

def by_hand(model, tokens, steps, dtype):
    """Low weights, fp32 masters under AdamW, written out: what the optimizer has to give."""
    kept = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(kept, lr=1e-3)
    model.to(dtype)
    for _ in range(steps):
        model.zero_grad()
        model(tokens, tokens).backward()
        for master, p in zip(kept, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(kept, model.parameters(), strict=True):
                p.copy_(master)
    return list(model.parameters()), kept


@pytest.mark.parametrize("bucket_bytes", [2**12, None])
@pytest.mark.parametrize("dtype", LOW)
def test_steps_are_those_of_masters_kept_by_hand(gpt, bucket_bytes, dtype):
    model, tokens = gpt
    if model.config.dropout:
        model.eval()
    other, optimizer = copy.deepcopy(model), wrapped(model, dtype, bucket_bytes=bucket_bytes)
    step(model, optimizer, tokens, 3)
    expected, kept = by_hand(other, tokens, 3, dtype)
    assert same(model.parameters(), expected) and same(masters(optimizer), kept)


def test_small_updates_are_not_lost():
    """Without a master the mutant stands still: 1 − 10⁻³ rounds to 1 in bf16."""
    for wrap, expected in ((MixedPrecisionOptimizer, 0.9), (lambda optimizer: optimizer, 1.0)):
        weight = nn.Parameter(torch.ones(1).bfloat16())
        optimizer = wrap(torch.optim.SGD([weight], lr=1e-3))
        for _ in range(100):
            weight.grad = torch.ones(1).bfloat16()
            optimizer.step()
        assert weight.item() == pytest.approx(expected, abs=2**-9)


def test_fp32_gradients_add_up_what_16_bits_would_lose():
    sums = {}
    for fp32_gradients in (True, False):
        weight = nn.Parameter(torch.ones(1))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), fp32_gradients=fp32_gradients)
        for _ in range(1000):
            weight.sum().backward()
        sums[fp32_gradients] = weight.grad.item()
        optimizer.step()
        assert weight.grad.item() == sums[fp32_gradients] and masters(optimizer)[0].item() == 1 - sums[fp32_gradients]
    assert sums == {True: 1000.0, False: 256.0}  # 256 + 1 = 256 in bf16


def test_clipping_on_the_way_to_fp32_is_torch_s(model, tokens):
    other, ours = copy.deepcopy(model), wrapped(model, max_grad_norm=0.1, inner=torch.optim.SGD)
    theirs = wrapped(other, inner=torch.optim.SGD, fp32_gradients=True)
    for each in (model, other):
        each(tokens, tokens).backward()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    ours.step()
    theirs.step()
    assert norm > 0.1 and ours.grad_norm.item() == pytest.approx(norm.item(), rel=1e-2)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(masters(ours), masters(theirs), strict=True))


def test_factors_of_gradients_multiply():
    (weight,), optimizer = ones(2)
    for _ in range(2):  # each for one step
        weight.grad = torch.ones(2).bfloat16()
        optimizer.multiply_gradients(0.5)
        optimizer.multiply_gradients(0.25)
        optimizer.step()
    assert masters(optimizer)[0].tolist() == [0.75, 0.75]


def test_a_norm_below_the_limit_is_left_as_it_is():
    (weight,), optimizer = ones(2, max_grad_norm=10.0)
    weight.grad = torch.tensor([0.75, 1.0]).bfloat16()
    optimizer.step()
    assert optimizer.grad_norm.item() == 1.25 and masters(optimizer)[0].tolist() == [0.25, 0.0]


@pytest.mark.parametrize("fp32_gradients", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_with_a_loss_scaler_clipping_sees_unscaled_gradients(fp32_gradients, unscale_first):
    """3 and 4 have norm 5; a gradient of 2⁻³⁰, times 2¹⁶, is one that fp16 holds, and without it would be 0."""
    tiny, weight = 2.0**-30, nn.Parameter(torch.zeros(3))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), torch.float16, fp32_gradients=fp32_gradients,
                                        max_grad_norm=None if unscale_first else 1.0)
    scaler = AdaptiveLossScaler(2.0**12)
    scaler.scale((weight.float() * torch.tensor([3.0, 4.0, tiny * 2.0**4])).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
        assert weight.grad.dtype is torch.float32 and weight.grad.tolist() == [3.0, 4.0, tiny * 2.0**4]
        nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(masters(optimizer)[0].detach(), -torch.tensor([0.6, 0.8, tiny * 2.0**4 / 5]), rtol=1e-4)
    assert masters(optimizer)[0][2] != 0
    optimizer.zero_grad()
    weight.float().sum().backward()
    assert weight.grad.dtype is (torch.float32 if fp32_gradients else torch.float16)  # 16 bytes again


def test_an_overflow_skips_the_step():
    ((weight,), optimizer), scaler = ones(2, dtype=torch.float16), AdaptiveLossScaler(8.0)
    for unscale_first, value in ((True, math.inf), (False, math.nan), (False, 1.0)):
        weight.grad = (scaler.get_scale() * torch.tensor([value, 1.0])).half()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert weight.grad.dtype is torch.float16
        scaler.update(new_scale=8.0)
        optimizer.zero_grad()
    assert scaler.skipped_steps == 2 and weight.tolist() == masters(optimizer)[0].tolist() == [0.0, 0.0]


# --- master and weight -----------------------------------------------------------------------------------------------

def test_master_and_weight_never_drift_apart(model, tokens):
    optimizer = wrapped(model)
    assert agree(optimizer)
    for _ in range(5):
        step(model, optimizer, tokens)
        assert agree(optimizer)


def test_loading_the_model_s_own_weights_changes_no_master(model, tokens):
    optimizer = wrapped(model)
    step(model, optimizer, tokens)
    before = [m.clone() for m in masters(optimizer)]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.sync_masters()
    assert same(before, masters(optimizer))


WRITES = {
    "load_state_dict": lambda weight, new, _: nn.ParameterDict({"weight": weight}).load_state_dict({"weight": new}),
    "copy_": lambda weight, new, _: torch.no_grad()(weight.copy_)(new),
    "data, then sync_masters": lambda weight, new, optimizer: (weight.data.copy_(new), optimizer.sync_masters()),
    "another tensor": lambda weight, new, _: setattr(weight, "data", new)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_that_somebody_writes_win_element_by_element(write):
    (weight,), optimizer = ones(2, inner=partial(torch.optim.SGD, lr=1e-3))
    optimizer.step()  # the masters are 0.999, which rounds to 1
    write(weight, torch.tensor([1.0, 5.0]).bfloat16(), optimizer)
    optimizer.step()
    assert torch.allclose(masters(optimizer)[0].detach(), torch.tensor([0.998, 4.999]), atol=1e-6) and agree(optimizer)


def test_a_model_that_is_converted_or_moved_afterwards_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0))
    nn.ParameterList([weight]).half()
    weight.grad_dtype = torch.float16
    weight.grad = torch.ones(2).half()
    with pytest.raises(ValueError, match=r"a weight of shape \(2,\) is torch.float16, and was made torch.bfloat16"):
        optimizer.step()
    (moved,), optimizer = ones(2)
    optimizer._masters[moved] = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="is on cpu, its master on meta: move the model before"):
        optimizer.step()


# --- as any optimizer ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16, "fp32_gradients": True, "max_grad_norm": 0.1}])
def test_save_and_resume_is_bit_equal(model, tokens, tmp_path, options):
    fresh, optimizer = copy.deepcopy(model), wrapped(model, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        step(model, optimizer, tokens)
        schedule.step()
    torch.save([each.state_dict() for each in (model, optimizer, schedule)], tmp_path / "saved")
    again = wrapped(fresh, **options)
    schedule_again = torch.optim.lr_scheduler.StepLR(again, 2, 0.5)
    for each, state in zip((fresh, again, schedule_again), torch.load(tmp_path / "saved"), strict=True):
        each.load_state_dict(state)
    for _ in range(3):
        for m, o, s in ((model, optimizer, schedule), (fresh, again, schedule_again)):
            step(m, o, tokens)
            s.step()
        assert same(model.parameters(), fresh.parameters()) and same(masters(optimizer), masters(again))
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_states_that_cannot_be_loaded(model, tokens):
    plain, optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters()), wrapped(model)
    step(model, optimizer, tokens)
    before = [m.clone() for m in masters(optimizer)]
    with pytest.raises(ValueError, match=r"no master weight in the state of parameters \[0\]"):
        optimizer.load_state_dict({"state": {0: {"step": 1}}, "param_groups": plain.state_dict()["param_groups"]})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert same(before, masters(optimizer))


def test_a_state_from_before_goes_to_the_masters(model, tokens):
    """An optimizer that has stepped in fp32 is wrapped later: its moments go on."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, inner, tokens)
    moments, optimizer = [inner.state[p]["exp_avg"] for p in model.parameters()], MixedPrecisionOptimizer(inner)
    assert all(optimizer.state[p]["exp_avg"] is m for p, m in zip(model.parameters(), moments, strict=True))
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())
    step(model, optimizer, tokens)
    assert optimizer.state[weights(optimizer)[0]]["step"] == 2


def test_groups_schedulers_and_add_param_group():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    inner = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}], lr=9.0)
    optimizer = MixedPrecisionOptimizer(inner, bucket_bytes=4)
    optimizer.add_param_group({"params": [third], "lr": 0.01})
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)
    assert third.dtype is torch.bfloat16 and third in optimizer.state
    for p in (first, second, third):
        p.grad = torch.ones(2).bfloat16()
    optimizer.step()
    schedule.step()
    optimizer.step()
    assert [m[0].item() for m in masters(optimizer)] == pytest.approx([-0.5, 0.85, 0.985])
    with pytest.raises(ValueError, match="parameter 3 of shape"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == len(inner.param_groups) == 3


def test_tied_weights_stay_tied(model, tokens):
    assert model.head.weight is model.embedding.weight
    optimizer = wrapped(model)
    step(model, optimizer, tokens)
    assert model.head.weight is model.embedding.weight and model.embedding.weight.dtype is torch.bfloat16
    assert len(masters(optimizer)) == len(list(model.parameters()))
    one = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="parameters 0 and 1 are two tensors in one memory"):
        MixedPrecisionOptimizer(torch.optim.SGD([one, nn.Parameter(one.data)]))


def test_frozen_parameters_cost_their_weight_only():
    frozen, other = nn.Parameter(torch.ones(8), requires_grad=False), nn.Parameter(torch.ones(8))
    with memory.track() as t:
        optimizer = MixedPrecisionOptimizer(torch.optim.AdamW([frozen, other], lr=0.1))
        other.grad = torch.ones(8).bfloat16()
        optimizer.step()
    assert t.now["optimizer state"] == 12 * 8 + 4 and frozen.dtype is torch.bfloat16
    frozen.requires_grad_()
    for p in (frozen, other):
        p.grad = torch.ones(8).bfloat16()
    optimizer.step()
    assert optimizer.state[frozen]["step"] == 1 and optimizer.state[other]["step"] == 2 and frozen[0] < 1
    again = MixedPrecisionOptimizer(torch.optim.AdamW([nn.Parameter(torch.ones(8), requires_grad=False),
                                                       nn.Parameter(torch.ones(8))]))
    again.load_state_dict(optimizer.state_dict())
    assert same(masters(optimizer), masters(again))


def test_parameters_that_the_optimizer_does_not_hold_stay():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert model[0].weight.dtype is torch.float32
    model.to(torch.bfloat16)
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    optimizer.step()
    assert agree(optimizer)


def test_closures():
    """Adam calls it once, LBFGS often; the result is that of fp32, within the rounding of the weights."""
    target = torch.tensor([1.0, -2.0, 3.0])
    for inner, steps in ((lambda p: torch.optim.Adam(p, lr=0.1), 200), (lambda p: torch.optim.LBFGS(p), 2)):
        weight = nn.Parameter(torch.zeros(3))
        optimizer, calls = MixedPrecisionOptimizer(inner([weight]), fp32_gradients=False), []
        def loss(weight=weight, calls=calls):
            calls.append((weight.float() - target).square().sum())
            return calls[-1]
        closure = closure_of(optimizer, loss)
        assert optimizer.step(closure).item() == 14.0
        for _ in range(steps):
            optimizer.step(closure)
        assert calls[-1] < 1e-3 and agree(optimizer)
        assert torch.allclose(masters(optimizer)[0].detach(), target, atol=0.05)
        assert all(m.grad is None for m in masters(optimizer))


@pytest.mark.parametrize(("bucket_bytes", "buckets_of_a_step"), [(16, 3), (None, 1)])
def test_hooks_of_the_inner_optimizer_run_for_each_bucket_and_ours_once(bucket_bytes, buckets_of_a_step):
    inside, outside, (_, optimizer) = [], [], ones(4, 3, bucket_bytes=bucket_bytes)
    optimizer.inner.register_step_post_hook(lambda *_: inside.append(1))
    optimizer.register_step_post_hook(lambda *_: outside.append(1))
    optimizer.step()
    assert (len(inside), len(outside)) == (buckets_of_a_step, 1)


def test_buckets_count_as_one_step():
    class CountsInItsGroup(torch.optim.SGD):
        """Some optimizers count steps for a group, not for a parameter."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    _, optimizer = ones(4, 3, partial(CountsInItsGroup, lr=0.1), bucket_bytes=16)
    optimizer.step()
    assert optimizer.param_groups[0]["count"] == 1
    assert all(m[0].item() == pytest.approx(0.9) for m in masters(optimizer))


def test_an_exception_in_a_step_leaves_groups_and_gradients_as_they_were():
    _, optimizer = ones(4, 3, bucket_bytes=16)
    optimizer.inner.step = Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert len(optimizer.inner.param_groups[0]["params"]) == 3 and all(m.grad is None for m in masters(optimizer))


def test_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1), max_grad_norm=100.0)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert (table.weight != before).any(1).tolist() == [False, True, False, True, False]
    assert optimizer.grad_norm.item() == pytest.approx((2 * 4 + 2) ** 0.5) and agree(optimizer)


def test_copies_are_independent_and_dry_runs_read_the_same(model, tokens):
    optimizer = wrapped(model, fp32_gradients=True)
    step(model, optimizer, tokens)
    optimizer.zero_grad()
    other_model, other = copy.deepcopy((model, optimizer))
    dry = memory.dry_run(step, model, optimizer, tokens)
    with memory.track(model, optimizer, tokens) as real:
        step(model, optimizer, tokens)
    assert dry.peak == real.peak and dry.now == real.now
    step(other_model, other, tokens)
    assert same(masters(optimizer), masters(other))
    assert {id(m) for m in masters(optimizer)}.isdisjoint(map(id, masters(other)))


def test_what_cannot_be_wrapped():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"MixedPrecisionOptimizer\(generator\): expected an optimizer"):
        MixedPrecisionOptimizer(nn.Linear(2, 2).parameters())
    inner = torch.optim.SGD([weight])
    for dtype in (torch.float32, torch.int8, "bf16"):
        with pytest.raises(ValueError, match="dtype=.*: expected torch.bfloat16 or torch.float16"):
            MixedPrecisionOptimizer(inner, dtype)
    for norm in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="max_grad_norm=.*: expected a finite number above 0"):
            MixedPrecisionOptimizer(inner, max_grad_norm=norm)
    for size in (0, -1, math.nan, "1"):
        with pytest.raises(ValueError, match="bucket_bytes=.*: expected bytes above 0"):
            MixedPrecisionOptimizer(inner, bucket_bytes=size)
        with pytest.raises(ValueError, match="bucket_bytes=.*: expected bytes above 0"):
            step_bytes([1], size)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\) is torch.float64: expected float32"):
        MixedPrecisionOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.float64))]))
    assert weight.dtype is torch.float32  # nothing was touched
    optimizer = MixedPrecisionOptimizer(inner)
    with pytest.raises(TypeError, match="MixedPrecisionOptimizer.MixedPrecisionOptimizer"):
        MixedPrecisionOptimizer(optimizer)
    with pytest.raises(ValueError, match="no parameter of this optimizer has a gradient: call loss.backward"):
        optimizer.step()


def test_lbfgs_works_on_the_masters():
    """It has its own name for the list of parameters. On 16-bit weights, updates of 10⁻³ near 100 would be lost."""
    weight = nn.Parameter(torch.full((3,), 100.0))
    optimizer = MixedPrecisionOptimizer(torch.optim.LBFGS([weight], lr=1e-3, max_iter=1))
    by_hand = torch.full((3,), 100.0, requires_grad=True)
    other = torch.optim.LBFGS([by_hand], lr=1e-3, max_iter=1)
    def closure_by_hand():
        by_hand.grad = 2 * (by_hand.detach().bfloat16().float() - 101).bfloat16().float()
        return (by_hand.detach().bfloat16().float() - 101).square().sum()
    for step in range(5):
        optimizer.step(closure_of(optimizer, lambda: (weight.float() - 101).square().sum()))
        other.step(closure_by_hand)
        assert torch.equal(masters(optimizer)[0], by_hand)
        if step == 2:  # saved and resumed on the way
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = MixedPrecisionOptimizer(torch.optim.LBFGS([weight], lr=1e-3, max_iter=1))
            optimizer.load_state_dict(state)
    assert by_hand[0] > 100 and agree(optimizer)


def test_a_frozen_weight_that_learns_later_is_one_of_lbfgs_s_too():
    """LBFGS has a name of its own for the list of its group's parameters."""
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)]
    optimizer = MixedPrecisionOptimizer(torch.optim.LBFGS(weights, lr=0.1, max_iter=1))
    weights[1].requires_grad_(True)
    for _ in range(2):
        optimizer.step(closure_of(optimizer, lambda: sum(weight.float().square().sum() for weight in weights)))
    assert masters(optimizer)[1][0] < 0.99 and agree(optimizer)


def test_a_copy_knows_of_weights_that_were_written_to_and_of_widened_gradients():
    weights, optimizer = ones(2, 2)
    with torch.no_grad():
        weights[0].fill_(4.0)
    optimizer.widen_gradients()
    copied = copy.deepcopy(optimizer)
    for p in copied.param_groups[0]["params"]:  # a copy of a parameter has no gradient
        p.grad = torch.ones(2, dtype=torch.float32)  # bf16 would be refused
    copied.step()
    assert masters(copied)[0].tolist() == [3.0, 3.0] and masters(copied)[1].tolist() == [0.0, 0.0]
