"""Compression: what is rounded and what is not, how far gradients are off, and what training makes of it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from users_kit import Named, function_of

from benchmarks.activations import train
from refimpl import memory
from refimpl.activations import compress_activations
from refimpl.activations.compress import KINDS, MASKS, Compressed
from refimpl.checkpointing import checkpoint, recompute
from refimpl.model import GPT, GPTConfig

METHODS = ["lossless", "bf16", "int8"]


def relative(found, expected):
    """‖found − expected‖ / ‖expected‖ over all gradients."""
    off = sum((a - b).double().square().sum() for a, b in zip(found, expected, strict=True))
    return math.sqrt(off / sum(b.double().square().sum() for b in expected))


def test_lossless_gradients_are_bit_equal(model, gradients, expected):
    """The dropout masks are packed to bits: in eval mode nothing would be tested."""
    context = compress_activations(model, "lossless", smallest=0)
    assert all(map(torch.equal, gradients(context), expected))
    assert context.report.before[MASKS] > 300_000 and context.report.counts[MASKS] == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_is_that_without(model, tokens, method, dtype):
    model.to(dtype)
    losses = []
    for context in (torch.enable_grad(), compress_activations(model, method, smallest=0)):
        torch.manual_seed(1)
        with context:
            losses.append(model(tokens, tokens))
    assert torch.equal(*losses), "the forward does not see what autograd keeps"


def test_the_gradient_of_a_linear_layer_is_off_by_no_more_than_the_bound():
    """dW = gᵀx, so |Δ dW| ≤ |g|ᵀ|x − x̂|, element by element; x̂ is within half a step of its group."""
    x, linear = torch.randn(256, 64, requires_grad=True) * 3, nn.Linear(64, 64, bias=False)
    g, group = torch.randn(256, 64), 32
    exact, parts = g.double().T @ x.detach().double(), x.detach().double().view(-1, group)
    half_step = ((parts.amax(1) - parts.amin(1)) / 510)[:, None].expand(-1, group).reshape(256, 64)
    for method, off in (("int8", half_step), ("bf16", 2**-8 * x.detach().double().abs())):
        with compress_activations(linear, method, smallest=0, group=group):
            y = linear(x)
        found, bound = torch.autograd.grad(y, linear.weight, g)[0].double(), g.double().abs().T @ off + 1e-3
        assert ((found - exact).abs() <= bound).all()
        assert (found - exact).abs().max() > 0.02 * bound.max(), "and it was rounded at all"


def test_the_gradient_of_a_gpt_is_off_by_little(model, gradients, expected):
    """A gradient is a product of Jacobians, each made of stored tensors that are off by their share: to first order
    the shares add up, as independent errors do, in squares. The model stores 12 rounded tensors in a row for each of
    two blocks and 4 outside, so √28 · share is the size to expect, and 28 · share the bound where all errors conspire.
    A tensor's share is 2⁻⁸ at most in bf16. In 8 bits it is (range/255)/√12 over the tensor's own root mean square:
    1.1 % for a normal group of 128, whose range is 5 of its σ, and more for softmax's, of which most are near 0.
    """
    off = {method: relative(gradients(compress_activations(model, method)), expected) for method in METHODS}
    assert off["lossless"] == 0 and 1e-4 < off["bf16"] < math.sqrt(28) * 2**-8
    assert off["bf16"] < off["int8"] < math.sqrt(28) * 0.011
    coarse, fine = (relative(gradients(compress_activations(model, group=group)), expected) for group in (8192, 16))
    assert fine < off["int8"] < coarse, "smaller groups, smaller ranges"


def test_stochastic_rounding_gives_the_right_gradient_in_the_mean():
    """Of what is linear in a stored tensor: the weight's gradient. Rounding to nearest is off by the same each time."""
    x, linear = torch.randn(64, 16, requires_grad=True) * 1, nn.Linear(16, 16, bias=False)
    g, runs = torch.randn(64, 16), 200
    def off(context):
        with context:
            y = linear(x)
        return torch.autograd.grad(y, linear.weight, g)[0] - g.T @ x.detach()
    context = compress_activations(linear, stochastic=True, smallest=0, group=64, seed=1)
    found = torch.stack([off(context) for _ in range(runs)])
    mean = found.mean(0).abs().mean()
    assert mean < 1.3 * found.abs().mean() / math.sqrt(runs), "each is off, their mean by 1/√runs of that"
    assert mean < off(compress_activations(linear, smallest=0, group=64)).abs().mean() / 3
    assert not torch.equal(found[0], found[1]), "numbers go on from region to region"


def test_numbers_of_the_user_are_not_touched(model, gradients):
    states = []
    for context in (None, compress_activations(model, stochastic=True), compress_activations(model, "lossless")):
        gradients(context)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_a_seed_decides_and_without_one_numbers_go_on(model, gradients):
    def once(**options):
        return gradients(compress_activations(model, stochastic=True, **options))
    assert all(map(torch.equal, once(seed=3), once(seed=3)))
    assert not all(map(torch.equal, once(seed=3), once(seed=4)))
    assert not all(map(torch.equal, once(), once())), "or each step would round the same way"
    nearest = [gradients(compress_activations(model)) for _ in range(2)]
    assert all(map(torch.equal, *nearest)), "unless it is asked for, nothing is random"


@pytest.mark.parametrize("options", [{"method": "bf16"}, {"method": "int8"}, {"method": "int8", "stochastic": True}])
def test_training_goes_as_without(options):
    """The real text, 60 steps of a small GPT. Single losses part, as after any small change (0.001 on one norm:
    0.13), and the mean of the last 20 does not."""
    plain, compressed = (train(60, "cpu", context, rate=3e-3) for context in (
        lambda model: torch.enable_grad(), lambda model: compress_activations(model, **options)))
    assert plain[0] == compressed[0] and plain[1:] != compressed[1:]
    end, compressed_end = sum(plain[-20:]) / 20, sum(compressed[-20:]) / 20
    fall = plain[0] - end
    assert fall > 2 and abs(end - compressed_end) < 0.01 * fall


def kinds(fn, *args, method="int8", **options):
    """(how many storages of each kind `fn(*args)` saves, what it returns)."""
    with compress_activations(nn.Linear(1, 1), method, smallest=0, **options) as c:
        out = fn(*args)
    return c.report.counts, out


@pytest.mark.parametrize("method", METHODS)
def test_statistics_labels_and_tables_are_never_rounded(method):
    x = torch.randn(64, 32, requires_grad=True) * 1
    labels, table = torch.randint(0, 32, (64,)), torch.randn(64, 32)
    def fn():
        norm = F.layer_norm(x, (32,))  # mean and 1/σ
        scale = x.square().mean(1, keepdim=True).rsqrt()  # one a row, with a gradient
        return norm * scale, F.cross_entropy(x, labels), x * table
    counts, _ = kinds(fn, method=method)
    assert counts["left: needs no gradient"] == 2 + 1 + 1  # statistics, labels, table
    assert counts["left: would not be smaller"] == 1  # what the loss was divided by, one number
    assert counts["left: one value a row" if method != "lossless" else "left: not a mask"] >= 1


def test_what_a_custom_function_makes_for_itself_is_left():
    """Nobody tells autograd whether a gradient flows through it; it may be a statistic. Its inputs are rounded."""
    own = function_of(lambda ctx, x: ctx.save_for_backward(x, x.exp()) or x.exp(),
                      lambda ctx, gradient: gradient * ctx.saved_tensors[1])
    counts, y = kinds(own.apply, torch.randn(1000, requires_grad=True) * 1)
    assert counts == {KINDS["int8"]: 1, "left: needs no gradient": 1} and y.requires_grad


def test_attentions_statistics_are_never_rounded():
    q = torch.randn(1, 2, 64, 16, requires_grad=True) * 1
    counts, out = kinds(F.scaled_dot_product_attention, q, q, q)
    assert counts[KINDS["int8"]] == 2 and out.requires_grad, "q, k and v are one storage; and the output"
    assert counts.get("left: needs no gradient", 0) >= 1, "logsumexp"


@pytest.mark.parametrize(("dtype", "method", "expected"), [
    (torch.float32, "bf16", KINDS["bf16"]), (torch.float64, "bf16", KINDS["bf16"]),
    (torch.bfloat16, "bf16", "left: bfloat16"), (torch.float16, "bf16", "left: float16"),
    (torch.float32, "int8", KINDS["int8"]), (torch.float64, "int8", KINDS["int8"]),
    (torch.bfloat16, "int8", KINDS["int8"]), (torch.float16, "int8", KINDS["int8"]),
    (torch.complex64, "int8", "left: complex64"), (torch.complex64, "lossless", "left: complex64")])
def test_types(dtype, method, expected):
    x = torch.randn(100, dtype=dtype).requires_grad_() * 1
    counts, y = kinds(torch.sin, x, method=method)
    assert counts == {expected: 1}
    found = torch.autograd.grad(y.abs().sum(), x)[0]
    assert found.dtype is dtype and found.isfinite().all()


def test_types_of_one_byte_and_integers_are_left():
    x, eight_bits = torch.randn(100, requires_grad=True), torch.randn(100).to(torch.float8_e4m3fn)
    counts, y = kinds(lambda: (x * 1)[torch.arange(100)].sum() + (x * eight_bits.float()).sum())
    assert counts == {"left: needs no gradient": 2}
    with compress_activations(nn.Linear(1, 1), smallest=0) as c:
        c._pack(eight_bits)
    assert c.report.counts == {"left: needs no gradient": 1} and y.requires_grad


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("method", ["bf16", "int8"])
def test_inf_and_nan_stay_what_they_are(value, method):
    x = torch.randn(1000)
    x[500] = value
    y = x.clone().requires_grad_() * 1
    with compress_activations(nn.Linear(1, 1), method, smallest=0) as c:
        back = c._pack(y).unpack()
    assert torch.equal(back.isfinite(), x.isfinite()) and str(back[500]) == str(y.detach()[500])
    if method == "int8":
        assert c.report.counts == {"left: inf or NaN in it": 1} and torch.equal(back[:500], x[:500])


def test_masked_scores_do_not_become_nan():
    """log-probabilities of −inf are right, and their gradient is 0."""
    logits = torch.randn(32, 100, requires_grad=True)
    def loss():
        return F.nll_loss((logits * 1).masked_fill(torch.arange(100) > 50, -math.inf).log_softmax(1),
                          torch.zeros(32, dtype=torch.int64))
    _, kept = kinds(loss)
    assert torch.equal(torch.autograd.grad(kept, logits)[0], torch.autograd.grad(loss(), logits)[0])


@pytest.mark.parametrize("masked", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_log_probabilities_of_masked_scores_are_left(masked):
    """Beside −1e9 a group knows its other values to ±2e6, and backward would take exp of that."""
    scores, hidden = torch.randn(32, 256, requires_grad=True), torch.arange(256) % 2 > 0
    def loss(value):
        return F.cross_entropy((scores * 1).masked_fill(hidden, value), torch.zeros(32, dtype=torch.int64))
    counts, kept = kinds(loss, masked)
    assert counts["left: logarithms too far apart"] == 1
    assert torch.equal(torch.autograd.grad(kept, scores)[0], torch.autograd.grad(loss(masked), scores)[0])
    counts, _ = kinds(loss, -8.0)
    assert counts[KINDS["int8"]] == 1, "that is no distance"


@pytest.mark.parametrize("options", [{"method": "lossless"}, {"method": "int8"}, {"stochastic": True}])
def test_meta_tensors_have_no_values_to_look_at(options):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 16)).to("meta")
    with compress_activations(model, smallest=0, **options) as c:
        loss = model(torch.randn(64, 16, device="meta")).sum()
    loss.backward()
    assert c.report.before.total >= c.report.after.total > 0


def test_dropout_of_a_cpu_is_bits():
    """Its noise is of x's own type, 0 or 1/(1 − p): two values, found again bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1001, dtype=dtype, requires_grad=True)
        with compress_activations(nn.Linear(1, 1), "lossless", smallest=0) as c:
            y = F.dropout(x * 1, 0.3)
        assert c.report.after == {MASKS: 126 + 2 * dtype.itemsize}
        gradient = torch.autograd.grad(y.sum(), x)[0]
        assert torch.equal(gradient != 0, y != 0) and gradient.unique().numel() == 2


def test_nothing_is_packed_that_would_not_get_smaller():
    x, empty = torch.randn(64, 1000).bfloat16().requires_grad_() * 1, torch.randn(0, 5, requires_grad=True) * 1
    for given, options, expected in ((x, {"group": 8}, "left: would not be smaller"), (x, {"group": 9}, KINDS["int8"]),
                                     (x, {"group": 1}, "left: would not be smaller"),
                                     (x[0, 0] * 1, {}, "left: one value a row"),
                                     (empty, {}, "left: would not be smaller")):
        assert kinds(torch.sin, given, **options)[0] == {expected: 1}


def test_the_threshold_is_the_first_size_that_is_packed():
    for elements, expected in ((1023, "left: smaller than 4,096 B"), (1024, KINDS["int8"])):
        x = torch.randn(elements, requires_grad=True) * 1
        with compress_activations(nn.Linear(1, 1)) as c:
            y = x.sin()
        assert c.report.counts == {expected: 1} and y.requires_grad


def test_a_fake_tensor_is_packed_without_a_look_at_its_values():
    config = GPTConfig(vocab_size=256, context_length=128, layers=2, hidden=64, heads=4)
    def forward(method):
        model, tokens = GPT(config), torch.randint(0, 256, (3, 67))
        with compress_activations(model, method, stochastic=method == "int8"):
            loss = model(tokens, tokens)
        loss.backward()
    for method in METHODS:
        dry = memory.dry_run(forward, method)
        with memory.track() as real:
            forward(method)
        assert dry.peak == real.peak


def test_in_a_dry_run_the_noise_of_dropout_is_left_whole():
    """Whether it has two values is a question to values."""
    def forward():
        return kinds(lambda: F.dropout(torch.ones(1000, requires_grad=True) * 1, 0.3), method="lossless")[0]
    found = []
    memory.dry_run(lambda: found.append(forward()))
    assert found == [{"left: needs no gradient": 1}] and forward() == {MASKS: 1}


def test_one_operation_decodes_once_and_nothing_waits_for_the_next(monkeypatch):
    """x · x saves x twice. Between two operations the decoded tensor goes."""
    decoded, x = [], torch.randn(1000, requires_grad=True)
    with compress_activations(nn.Linear(1, 1), smallest=0) as c:
        y = x * 1
        loss = (y * y).sum() + y.sin().sum()
    del y
    for stored in c.report._stored:
        decode = stored._code.decode
        object.__setattr__(stored._code, "decode", lambda decode=decode: decoded.append(1) or decode())
    with memory.track() as t:
        loss.backward()
    assert len(decoded) == 2 and t.now["activations"] == 0, "decoded once for the product, once for the sine"
    assert torch.allclose(x.grad, 2 * x.detach() + x.detach().cos(), atol=0.1)


def test_around_a_checkpoint_the_inputs_of_regions_are_packed(model, tokens, gradients, expected):
    """The region's own hooks are the innermost: inside it, slots; its input is the compression's."""
    with recompute(model.blocks):
        plain, context = gradients(), compress_activations(model, "int8")
        found = gradients(context)
    assert all(map(torch.equal, plain, expected))
    inputs = 2 * tokens.numel() * 64 * 4  # of two blocks
    outside = tokens.numel() * (2 * 64 + 256) * 4  # last norm, head, log-probabilities
    assert context.report.before[KINDS["int8"]] == inputs + outside and 0 < relative(found, expected) < 0.05


def test_backward_inside_the_region_recomputes_what_it_did_outside(model, tokens):
    """Then our hooks are there while a checkpoint runs its function again; its own are the innermost."""
    readings = []
    for inside in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        with recompute(model.blocks):
            with compress_activations(model) as context:
                loss = model(tokens, tokens)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        readings.append(([p.grad.clone() for p in model.parameters()], context.report.before))
    assert all(map(torch.equal, readings[0][0], readings[1][0])) and readings[0][1] == readings[1][1]


def test_inside_a_checkpoint_it_packs_what_would_be_recomputed():
    """So nothing is recomputed; one of the two is enough."""
    calls, linear = [], nn.Linear(64, 64)
    def fn(x):
        calls.append(1)
        with compress_activations(linear, "bf16", smallest=0) as c:
            y = linear(x.sin()).cos()
        calls.append(c.report.counts)
        return y
    x = torch.randn(64, 64, requires_grad=True) * 1
    checkpoint(fn, x).sum().backward()
    assert calls == [1, {KINDS["bf16"]: 3}]


def test_under_autocast_casts_of_weights_are_left(model, tokens):
    with torch.autocast("cpu", torch.bfloat16), compress_activations(model, "int8", smallest=0) as c:
        loss = model(tokens, tokens)
    packed = {stored.described for stored in c.report._stored}
    for shape in {parameter.shape for parameter in model.parameters()}:
        assert f"bfloat16 {list(shape)}" not in packed and f"bfloat16 {list(shape[::-1])}" not in packed
    assert loss.isfinite()


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "int4"}, "method='int4': expected 'lossless', 'bf16', 'int8'"),
    ({"group": 0}, "group=0: expected an integer of at least 1, the values"),
    ({"group": 1.5}, "group=1.5"), ({"group": True}, "group=True"),
    ({"method": "bf16", "stochastic": True}, "stochastic=True with method='bf16': expected method='int8'"),
    ({"stochastic": True, "seed": 1.5}, "seed=1.5: expected an integer from 0 to"),
    ({"stochastic": True, "seed": -1}, "seed=-1: expected an integer from 0 to"),
    ({"seed": 3}, "seed=3 without stochastic=True has no effect")])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        compress_activations(nn.Linear(1, 1), **options)


def test_mutants_are_seen(model, gradients, expected, monkeypatch):
    """A version that packs nothing, and one that decodes something else."""
    monkeypatch.setattr(Compressed, "restore", lambda self: self._code.decode().roll(1))
    assert not all(map(torch.equal, gradients(compress_activations(model, "lossless")), expected))


@pytest.mark.parametrize("technique", [compress_activations, checkpoint])
def test_a_function_of_the_users_may_set_any_attribute(technique):
    body, x = nn.Linear(64, 64), torch.randn(64, 64)
    def forward(x):
        return Named.apply(body(x)).square().sum()
    if technique is checkpoint:
        checkpoint(forward, x).backward()
    else:
        with compress_activations(body, smallest=0):
            forward(x).backward()
    assert body.weight.grad is not None
