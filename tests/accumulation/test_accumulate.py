"""Accumulated gradients are the whole batch's, at one micro-batch's activations; versions that are not are seen."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from ragged_kit import Net, gradients, whole
from ragged_kit import ragged as padded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero_steps import most

from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_bytes, split
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=32, layers=2, hidden=32, heads=4)
ROWS, LENGTH, LARGEST = 12, 16, CONFIG.vocab_size * CONFIG.hidden
TOKENS = torch.zeros(4, 8, dtype=torch.int64)
Double = partial(Net, config=CONFIG)  # in fp64


def ragged():
    """(tokens, targets): rows of very different lengths, padded; the fourth has no target at all."""
    return padded(*torch.randint(0, 256, (2, ROWS, LENGTH)), 2 * [16, 1, 9, 0, 13, 2])


def distance(ours, theirs):
    """Norm of the difference, over the norm of `theirs`."""
    apart, norm = (sum(t.double().square().sum() for t in tensors).sqrt()
                   for tensors in ([a.double() - b.double() for a, b in zip(ours, theirs, strict=True)], theirs))
    return (apart / norm).item()


# --- the same gradient -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("micro_batch", [1, 5, 6, 12, 100])
@pytest.mark.parametrize(("build", "within"), [(Double, 1e-13), (lambda: GPT(CONFIG), 2e-6)])
def test_the_gradient_is_that_of_the_whole_ragged_batch(micro_batch, build, within):
    model, batch = build(), ragged()
    loss, expected = whole(model, *batch)
    said = accumulate(model, *batch, micro_batch=micro_batch)
    assert not said.requires_grad and said.shape == () and abs(said - loss) <= 1e-6 * loss
    assert distance(gradients(model), expected) <= within


def mean_of_the_classes(model, x, y):
    return F.cross_entropy(model(x), y)


def sum_of_squares(model, x, y):
    return (model(x) - F.one_hot(y, 3)).square().sum()


@pytest.mark.parametrize(("loss_fn", "options"), [
    (mean_of_the_classes, {}), (sum_of_squares, {"reduction": "sum"}),
    (lambda model, x, y: sum_of_squares(model, x, y) / len(x), {"count": lambda x, y: len(x)}),
    (lambda model, x, y: mean_of_the_classes(model, x, y).reshape(1), {})])
def test_loss_functions_that_give_means_and_sums(loss_fn, options):
    model, batch = nn.Linear(5, 3).double(), (torch.randn(10, 5).double(), torch.randint(0, 3, (10,)))
    loss, expected = whole(model, *batch, loss_fn=loss_fn)
    assert torch.allclose(accumulate(model, *batch, micro_batch=4, loss_fn=loss_fn, **options), loss.reshape(()))
    assert distance(gradients(model), expected) <= 1e-14


def test_parts_of_their_own_lengths_and_batches_in_dicts():
    model, (tokens, targets) = Double(), ragged()
    _, expected = whole(model, tokens, targets)
    rows = [0, 1, 2, 4, 6, 7, 8, 10, 3, 9, 5, 11]
    parts = [(x[:, :n], y[:, :n]) for n, x, y in zip([16, 16, 2], tokens[rows].split(4), targets[rows].split(4),
                                                     strict=True)]
    accumulate(model, micro_batches=iter(parts))
    assert distance(gradients(model), expected) <= 1e-13
    model.zero_grad()
    accumulate(model, {"tokens": tokens, "labels": targets, "mask": None}, micro_batch=5,
               loss_fn=lambda model, part: model(part["tokens"], part["labels"]),
               count=lambda part: (part["labels"] != -100).sum().item())
    assert distance(gradients(model), expected) <= 1e-13


def test_gradients_are_added_to_those_that_are_there():
    model, batch = Double(), ragged()
    _, expected = whole(model, *batch)
    accumulate(model, *batch, micro_batch=4)
    accumulate(model, *batch, micro_batch=12)
    assert distance(gradients(model), [2 * each for each in expected]) <= 1e-13


def test_training_is_the_same_with_clipping_a_schedule_and_frozen_parameters():
    trained = {}
    for micro_batch in (12, 5):
        torch.manual_seed(0)
        model = Double()
        model.positions.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(4):
            accumulate(model, *ragged(), micro_batch=micro_batch)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        trained[micro_batch] = list(model.parameters())
    assert distance(trained[5], trained[12]) <= 1e-7


def test_recomputed_activations_and_tied_weights_in_low_precision():
    """Autograd then writes a gradient more than once in a backward."""
    linear, x = nn.Linear(4, 4).bfloat16(), torch.randn(8, 4).bfloat16().requires_grad_()
    for reentrant in (False, True):
        def twice(model, x, reentrant=reentrant):
            for _ in range(2):
                x = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
            return x.float().square().mean()
        _, expected = whole(linear, x, loss_fn=twice)
        accumulate(linear, x, micro_batch=2, loss_fn=twice)
        assert distance(gradients(linear), expected) <= 0.01
        linear.zero_grad()


def test_dropout_is_that_of_a_loop_by_hand_and_new_in_each_micro_batch():
    model, (tokens, targets) = GPT(replace(CONFIG, dropout=0.3)), ragged()
    targets = targets.clamp_min(0)
    torch.manual_seed(1)
    accumulate(model, tokens, targets, micro_batch=3)
    ours, state = gradients(model), torch.get_rng_state()
    model.zero_grad()
    torch.manual_seed(1)
    for part in zip(tokens.split(3), targets.split(3), strict=True):
        (model(*part) / 4).backward()
    assert distance(ours, gradients(model)) <= 1e-6 and torch.equal(state, torch.get_rng_state())
    model.zero_grad()
    same, masks = torch.ones(8, 16), []
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    layer.register_forward_hook(lambda module, args, out: masks.append(out == 0))
    accumulate(layer, same, micro_batch=4, loss_fn=lambda model, x: model(x).mean())
    assert not torch.equal(*masks)


def test_a_loss_scaler_sees_every_loss_and_one_step():
    model, batch = GPT(CONFIG), ragged()
    loss, expected = whole(model, *batch)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.isclose(accumulate(model, *batch, micro_batch=4, scale=scaler.scale), loss)
    assert distance(gradients(model), [1024 * each for each in expected]) <= 2e-6
    scaler.unscale_(optimizer)
    assert distance(gradients(model), expected) <= 2e-6


def test_batch_norm_in_training_is_the_caveat():
    def cubes(model, x):
        return model(x).pow(3).mean()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), torch.randn(12, 4).double()
    apart = {}
    for training in (True, False):
        model.train(training)
        _, expected = whole(model, x, loss_fn=cubes)
        accumulate(model, x, micro_batch=3, loss_fn=cubes)
        apart[training] = distance(gradients(model), expected)
        model.zero_grad()
    assert apart[True] > 0.01 and apart[False] <= 1e-13


# --- versions that are wrong -----------------------------------------------------------------------------------------

def by_hand(model, *batch, micro_batch, weight=1):
    """The loop as it is written by hand; without `weight`, every micro-batch's mean loss counts in full."""
    for part in split(batch, micro_batch):
        (model(*part) * weight).backward()


def test_without_division_the_gradient_is_four_times_too_large():
    model, (tokens, _) = Double(), ragged()
    _, expected = whole(model, tokens, tokens)
    by_hand(model, tokens, tokens, micro_batch=3)
    assert distance(gradients(model), [4.0 * each for each in expected]) <= 1e-13


def test_a_mean_of_means_is_not_the_mean_where_rows_are_ragged():
    model, batch = Double(), ragged()
    batch = [each[[0, 1, 2, 4]] for each in batch]
    _, expected = whole(model, *batch)
    by_hand(model, *batch, micro_batch=1, weight=1 / 4)
    assert distance(gradients(model), expected) > 0.1
    model.zero_grad()
    accumulate(model, *batch, micro_batch=1)
    assert distance(gradients(model), expected) <= 1e-13


def test_clipping_each_micro_batch_is_another_gradient():
    model, batch, whole_norm = Double(), ragged(), 0.5
    model(*batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), whole_norm)
    expected = gradients(model)
    model.zero_grad()
    accumulate(model, *batch, micro_batch=4)
    nn.utils.clip_grad_norm_(model.parameters(), whole_norm)
    assert distance(gradients(model), expected) <= 1e-13
    summed = [torch.zeros_like(each) for each in expected]
    for part in split(batch, 4):
        model.zero_grad()
        (model(*part) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), whole_norm)
        for total, each in zip(summed, gradients(model), strict=True):
            total += each
    assert distance(summed, expected) > 0.1


# --- bytes -----------------------------------------------------------------------------------------------------------

def explained(micro_batches, rows, dtype=torch.float32):
    """The peak of a step, to the byte: the closed form, and what stands beside it at the loss's backward."""
    count, tensors = CONFIG.parameter_count(), len(list(GPT(CONFIG).parameters()))
    states = memory.model_state_bytes(count, "adamw", "fp32" if dtype is torch.float32 else "bf16", tensors)
    activations = memory.activation_bytes(CONFIG, rows, LENGTH, dtype)
    held = accumulation_bytes(count, activations, micro_batches, gradient=dtype)
    temporaries = 2 * 4 * rows * LENGTH * CONFIG.vocab_size + 4 + 4 + 4 * (micro_batches > 1)
    return memory.Ledger(parameters=states["parameters"], optimizer_state=states["optimizer state"],
                         inputs=8 * rows * LENGTH * micro_batches, temporaries=temporaries) + held - memory.Ledger(
                             activations=4)


def traced(accumulator, micro_batches, rows=2, dtype=torch.float32):
    """(trace, the allocator's peak) of a step, not the first."""
    model = GPT(CONFIG, dtype=dtype)
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 256, (micro_batches * rows, LENGTH))
    def step():
        accumulator(model, tokens, tokens, micro_batch=rows)
        optimizer.step()
        optimizer.zero_grad()
    step()
    with memory.track(model, optimizer, tokens) as t, memory.measure("cpu") as m:
        step()
    return t, m.peak


def check_bytes(accumulator, dtype=torch.float32):
    """The peak is what the closed form says, whatever the number of micro-batches, on both instruments."""
    above_inputs, allocators = set(), set()
    for micro_batches in (2, 4, 1):
        t, allocator = traced(accumulator, micro_batches, dtype=dtype)
        assert t.peak == explained(micro_batches, 2, dtype), micro_batches
        assert abs((t.peak.total - t.start.total) - allocator) <= (64 if dtype is torch.float32 else 0.02 * allocator)
        if micro_batches > 1:
            above_inputs.add(t.peak.total - t.peak["inputs"])
            allocators.add(allocator)
            assert most(t, "gradients") <= 4 * CONFIG.parameter_count() + LARGEST * (4 - dtype.itemsize)
    assert len(above_inputs) == len(allocators) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_does_not_know_the_number_of_micro_batches(dtype):
    check_bytes(accumulate, dtype)


def losses_kept(model, *batch, micro_batch):
    """One backward of the sum of all losses: the same gradient, and every micro-batch's activations at once."""
    parts = split(batch, micro_batch)
    sum(model(*part) / len(parts) for part in parts).backward()


def low_gradients_kept(model, *batch, micro_batch):
    """Sums in fp32, made after each backward: the low-precision gradients of all parameters are there at once."""
    sums = {}
    for part in split(batch, micro_batch):
        model(*part).backward()
        for parameter in model.parameters():
            gradient = memory.mark(parameter.grad.float(), "gradients")
            sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient
        model.zero_grad()
    for parameter, gradient in sums.items():
        parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize(("mutant", "dtype"), [(losses_kept, torch.float32), (low_gradients_kept, torch.bfloat16)])
def test_versions_that_save_nothing_are_seen(mutant, dtype):
    with pytest.raises(AssertionError):
        check_bytes(mutant, dtype)


def test_what_the_versions_that_save_nothing_hold():
    one, count = memory.activation_bytes(CONFIG, 2, LENGTH), CONFIG.parameter_count()
    (kept, _), (ours, _) = (traced(accumulator, 4) for accumulator in (losses_kept, accumulate))
    assert abs(ours.peak["activations"] - one) <= 4 and abs(kept.peak["activations"] - 4 * one) <= 16
    (kept, _), (ours, _) = (traced(each, 2, dtype=torch.bfloat16) for each in (low_gradients_kept, accumulate))
    assert most(ours, "gradients") == 4 * count + 2 * LARGEST and most(kept, "gradients") >= 6 * count


def test_one_micro_batch_sums_nothing_and_keeps_bf16_gradients():
    t, _ = traced(accumulate, 1, dtype=torch.bfloat16)
    assert most(t, "gradients") == 2 * CONFIG.parameter_count()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_loss_is_summed_in_fp32(dtype):
    model, x = nn.Linear(1, 1, bias=False).to(dtype), torch.tensor([256.0] + 8 * [1.0], dtype=dtype)[:, None]
    nn.init.ones_(model.weight)
    loss = accumulate(model, x, micro_batch=1, loss_fn=lambda model, x: 8 * model(x).sum(), reduction="sum")
    assert loss.dtype is torch.float32 and loss.item() == 8 * 264  # in bf16, 8 added to 2048 is lost each time


def test_a_dry_run_reads_the_same_bytes():
    def step(dtype):
        tokens = torch.randint(0, 256, (7, LENGTH))
        accumulate(GPT(CONFIG, dtype=dtype), tokens, tokens, micro_batch=3)
    for dtype in (torch.float32, torch.bfloat16):
        with memory.track() as real:
            step(dtype)
        dry = memory.dry_run(step, dtype)
        assert dry.peak == real.peak and dry.now == real.now


@pytest.mark.parametrize(("arguments", "expected"), [
    ((10, 7, 1), {"activations": 7}), ((10, 7, 2), {"gradients": 40, "activations": 7}),
    ((10, 7, 99), {"gradients": 40, "activations": 7}),
    ((10, 7, 2, torch.bfloat16), {"gradients": 40, "activations": 7}),
    ((10, 7, 2, torch.bfloat16, None), {"gradients": 20, "activations": 7}),
    ((10, 7, 2, torch.float64), {"gradients": 80, "activations": 7})])
def test_the_closed_form(arguments, expected):
    assert accumulation_bytes(*arguments) == expected


@pytest.mark.parametrize(("types", "message"), [
    ({"gradient": "bf16"}, "gradient='bf16': expected a floating-point type, such as torch.float32$"),
    ({"gradient": None}, "gradient=None: expected a floating-point type"),
    ({"dtype": torch.int8}, "dtype=torch.int8: expected a floating-point type, such as torch.float32, or None$")])
def test_the_closed_form_takes_types_of_numbers(types, message):
    with pytest.raises(ValueError, match=message):
        accumulation_bytes(1, 1, 2, **types)


@pytest.mark.parametrize("arguments", [(-1, 0, 1), (1, -1, 1), (1, 1, 0), (1.5, 1, 1), (1, 1, True)])
def test_the_closed_form_takes_counts(arguments):
    with pytest.raises(ValueError, match="expected an integer of at least"):
        accumulation_bytes(*arguments)


# --- bad input, exceptions -------------------------------------------------------------------------------------------

BAD_OPTIONS = [  # beside TOKENS, TOKENS
    ({"micro_batch": 0}, ValueError, "micro_batch=0: expected an integer"),
    ({"micro_batch": -3}, ValueError, "micro_batch=-3"), ({"micro_batch": float("nan")}, ValueError, "micro_batch=nan"),
    ({"micro_batch": 2.0}, ValueError, "micro_batch=2.0"), ({"micro_batch": True}, ValueError, "micro_batch=True"),
    ({"count": lambda *_: float("nan")}, ValueError, "count returned nan for micro-batch 0"),
    ({"count": lambda x, y: x}, ValueError, "expected one number"),
    ({"reduction": "avg"}, ValueError, "reduction='avg'"),
    ({"dtype": torch.int32}, ValueError, "dtype=torch.int32"), ({"dtype": "fp32"}, ValueError, "dtype='fp32'"),
    ({"scale": 8.0}, TypeError, "scale=8.0: expected a function")]


@pytest.mark.parametrize(("call", "error", "message"), [
    *((lambda m, options=options: accumulate(m, TOKENS, TOKENS, **{"micro_batch": 2, **options}), error, message)
      for options, error, message in BAD_OPTIONS),
    (lambda m: accumulate(m, TOKENS, TOKENS), ValueError, "expected either a batch and micro_batch="),
    (lambda m: accumulate(m, micro_batch=2), ValueError, "expected either a batch and micro_batch="),
    (lambda m: accumulate(m, TOKENS, micro_batches=[TOKENS]), ValueError, "or micro_batches="),
    (lambda m: accumulate(m, micro_batches=[]), ValueError, "micro_batches is empty: expected"),
    (lambda m: accumulate(m, micro_batches=[(TOKENS, TOKENS[:2])]), ValueError, "expected one number of rows"),
    (lambda m: accumulate(m, TOKENS[:0], TOKENS[:0], micro_batch=2), ValueError, "the batch is empty"),
    (lambda m: accumulate(m, TOKENS, TOKENS[:3], micro_batch=2), ValueError, r"\(4, 8\), \(3, 8\)"),
    (lambda m: accumulate(m, TOKENS, TOKENS - 100, micro_batch=2), ValueError, "every target of the batch is ignored"),
    (lambda m: accumulate(GPT(CONFIG).requires_grad_(False), TOKENS, TOKENS, micro_batch=2), ValueError,
     "no parameter that requires a"),
    (lambda m: accumulate(nn.ReLU(), TOKENS, TOKENS, micro_batch=2), ValueError, "ReLU has no parameter"),
    (lambda m: accumulate(m.forward, TOKENS, TOKENS, micro_batch=2), TypeError, "expected a module")])
def test_bad_input_says_what_and_touches_no_gradient(call, error, message):
    model = GPT(CONFIG)
    model(TOKENS, TOKENS).backward()
    before = [each.clone() for each in gradients(model)]
    with pytest.raises(error, match=message):
        call(model)
    assert all(map(torch.equal, gradients(model), before))


@pytest.mark.parametrize(("loss_fn", "error", "message"), [
    (lambda m, x, y: m(x), ValueError, r"the loss has shape \(2, 8, 256\)"),
    (lambda m, x, y: {"loss": m(x, y)}, TypeError, "the loss is of type dict"),
    (lambda m, x, y: m(x, y).detach(), ValueError, "under no_grad")])
def test_losses_that_are_none(loss_fn, error, message):
    with pytest.raises(error, match=message):
        accumulate(GPT(CONFIG), TOKENS, TOKENS, micro_batch=2, loss_fn=loss_fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["forward", "backward", "scale"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_after_an_exception_no_gradient_and_no_hook_is_left(dtype, where, error):
    model, calls = GPT(CONFIG, dtype=dtype), []
    def third_time(*_):
        calls.append(where)
        if len(calls) == 3:
            raise error("third")
    def loss_fn(model, x, y):
        if where == "forward":
            third_time()
        return model(x, y)
    if where == "backward":
        model.norm.weight.register_hook(third_time)
    before = [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters()]
    model(TOKENS, TOKENS).backward()
    calls.clear()
    with pytest.raises(error, match="third"):
        accumulate(model, TOKENS, TOKENS, micro_batch=1, loss_fn=loss_fn,
                   scale=lambda loss: third_time() or loss if where == "scale" else loss)
    assert gradients(model) == [None] * len(before)
    assert [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters()] == before


def test_no_sync_is_left_after_an_exception():
    class Wrapped(nn.Linear):
        depth = 0

        @contextmanager
        def no_sync(self):
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

    model, x, seen = Wrapped(2, 1), torch.ones(4, 2), []
    accumulate(model, x, micro_batch=1, loss_fn=lambda m, x: seen.append(m.depth) or m(x).mean())
    assert seen == [1, 1, 1, 0] and model.depth == 0
    with pytest.raises(ZeroDivisionError):
        accumulate(model, x, micro_batch=1, loss_fn=lambda m, x: 1 / 0)
    assert model.depth == 0 and model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_hook_that_takes_gradients_away_is_named(dtype, micro_batch):
    """An optimizer that steps in backward, say, would step on each micro-batch's share, and leave `.grad` None."""
    model, x = nn.Linear(4, 2).to(dtype), torch.randn(4, 4, dtype=dtype)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(RuntimeError, match=r"gradient of a parameter of shape \(2, 4\) was taken away during backward.*"
                                           "step after accumulate"):
        accumulate(model, x, micro_batch=micro_batch, loss_fn=lambda model, x: model(x).float().square().mean())
    assert model.weight.grad is None and model.bias.grad is None and len(model.weight._post_accumulate_grad_hooks) == 1
    assert not model.bias._post_accumulate_grad_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_hook_of_the_node_that_takes_gradients_away_is_named(dtype, micro_batch):
    """It runs after those of the parameter. Sums in fp32 have the gradient by then, and are not disturbed."""
    model, x = nn.Linear(4, 2, bias=False).to(dtype), torch.randn(4, 4, dtype=dtype)
    (node, _), = model.weight.view_as(model.weight).grad_fn.next_functions
    hook = node.register_hook(lambda *_: setattr(model.weight, "grad", None))
    def run():
        return accumulate(model, x, micro_batch=micro_batch, loss_fn=lambda model, x: model(x).float().square().mean())
    if dtype is torch.bfloat16 and micro_batch == 2:
        run()
        hook.remove()
        found = model.weight.grad
        model.zero_grad()
        run()
        assert torch.equal(found, model.weight.grad)
    else:
        with pytest.raises(RuntimeError, match=r"gradient of a parameter of shape \(2, 4\) was taken away"):
            run()
        assert model.weight.grad is None and not model.weight._post_accumulate_grad_hooks


def test_a_hook_that_changes_gradients_is_left_to_it():
    model, x = nn.Linear(4, 1, bias=False), torch.ones(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(max=0.75)))
    accumulate(model, x, micro_batch=2, loss_fn=lambda model, x: model(x).mean())
    assert model.weight.grad.tolist() == [[0.75] * 4]


def test_a_scale_that_gives_nothing_is_named():
    x = torch.randn(4, 4)
    with pytest.raises(TypeError, match="scale returned NoneType: expected the loss that it was given"):
        accumulate(nn.Linear(4, 2), x, micro_batch=2, loss_fn=lambda model, x: model(x).mean(), scale=lambda loss: None)
