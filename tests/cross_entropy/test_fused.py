"""The loss by Triton kernels, interpreted: numbers of the logits, bytes by closed form, bad input, a dry run."""

import itertools

import pytest
import torch
from head_kit import EVERYTHING, errors, exact, head, plain, sum_bound, with_gradients
from interpreting import interpreted

from refimpl import memory
from refimpl.comm.traffic import Traffic, ring_traffic
from refimpl.cross_entropy import fused_cross_entropy_bytes, fused_linear_cross_entropy, split_cross_entropy_traffic


def test_numbers_are_those_of_the_logits():
    shapes = (70, 40, 203), (1, 5, 3), (33, 64, 128)
    cases = [(head(*shape, bias=bias), {"reduction": reduction, **options}) for shape, bias, reduction, options in
             itertools.product(shapes, [False, True], ["mean", "sum"], [{}, EVERYTHING])]
    found = interpreted([("head_bodies:loss_and_gradients", given, options) for given, options in cases])
    for (given, options), results in zip(cases, found, strict=True):
        assert max(errors(results, exact(*given, **options))) < 2e-6


def test_error_is_no_larger_than_the_plain_ones_in_fp16():
    given = [head(96, 64, 203, torch.float16, seed=seed, ignored=0) for seed in range(4)]
    found = interpreted([("head_bodies:loss_and_gradients", each, {}) for each in given])
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for (hidden, weight, targets, _), ours in zip(given, found, strict=True):
        theirs = with_gradients(plain(hidden, weight, targets), hidden, weight)
        reference = exact(hidden, weight, targets)
        for k, results in enumerate((ours, theirs)):
            assert [x.dtype for x in results] == [torch.float32, torch.float16, torch.float16]
            pairs = list(zip(results, reference, strict=True))[1:]
            sums[k] += torch.stack([(a.double() - b).square().mean() for a, b in pairs])
    assert (sums[0] <= sums[1] * 1.02).all(), sums


def test_all_targets_ignored_is_zero_and_frozen_parts_have_no_gradient():
    ignored, frozen, body = head(10, 8, 20, ignored=1), head(40, 8, 70), head(40, 8, 70)
    frozen[1].requires_grad_(False), body[0].requires_grad_(False)
    zero, first, second = interpreted([("head_bodies:loss_and_gradients", x, {}) for x in (ignored, frozen, body)])
    assert all((x == 0).all() for x in zero)
    expected = exact(*head(40, 8, 70))
    assert max(errors(first, expected[:2])) < 2e-6 and max(errors(second, [expected[0], expected[2]])) < 2e-6


def test_bytes_are_the_closed_forms():
    shapes, dtypes = ((70, 40, 203), (33, 80, 130), (200, 16, 30)), (torch.float32, torch.float16)
    cases = itertools.product(shapes, dtypes, (False, True))
    cases = [(*case, parts) for case, parts in zip(cases, itertools.cycle((1, 1, 3)), strict=False)]
    found = interpreted([("head_bodies:bytes_read", head(*shape, dtype, bias=bias), {"parts": parts})
                         for shape, dtype, bias, parts in cases])
    for ((N, C, V), dtype, bias, parts), taken in zip(cases, found, strict=True):
        form = fused_cross_entropy_bytes(N, V, C, dtype, bias=bias, parts=parts)
        assert taken == (form.saved, form.forward, form.peak) and (form.forward < N * V * 4 or V < 64)


WAYS = {"sums in fp32": {}, "its own": {"weight_gradient": torch.float16}, "autocast": {"autocast": True}}


def test_bytes_of_blocks_of_words():
    shapes = itertools.cycle(((20, 40, 203), (40, 8, 30)))
    of_loss = itertools.cycle(((False, 1), (False, 2), (True, 2), (True, 1)))
    cases = [(next(shapes), way, *next(of_loss)) for way in [*WAYS] * 3]
    dtypes = {way: torch.float32 if way == "autocast" else torch.float16 for way in WAYS}
    found = interpreted([("head_bodies:bytes_read", head(*shape, dtypes[way], bias=bias), {"parts": parts, **WAYS[way]})
                         for shape, way, bias, parts in cases])
    for ((N, C, V), way, bias, parts), taken in zip(cases, found, strict=True):
        given = {"weight_dtype": torch.float32} if way == "autocast" else WAYS[way]
        form = fused_cross_entropy_bytes(N, V, C, torch.float16, bias=bias, parts=parts, **given)
        assert taken == (form.saved, form.forward, form.peak), (way, N, V, C, bias, parts)
    (N, C, V), taken = cases[0][0], found[0]  # a sum of dW beside its cast, as before, is seen
    assert taken[2] < V * C * 4 < V * C * 6


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"ignore_index": 60}, {"reduction": "sum"}], ids=str)
def test_numbers_of_blocks_of_words(options):
    """Words in several blocks, some of which have no target; sums of dW in fp16 stay within their bound."""
    given = [head(*shape, torch.float16, bias=True) for shape in ((70, 24, 301), (33, 5, 203))]
    ignored = options.get("ignore_index", -100)
    given = [(hidden, weight, targets.masked_fill(targets == -100, ignored), bias)
             for hidden, weight, targets, bias in given]
    found = interpreted([("head_bodies:loss_and_gradients", each, options | more)
                         for each in given for more in ({}, {"weight_gradient": torch.float16})])
    for each, wide, own in zip(given, found[::2], found[1::2], strict=True):
        assert max(errors(wide, exact(*each, **options))) < 3e-3
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(wide, own, strict=True)) if i != 2)
        off = (own[2].double() - wide[2].double()).abs()
        assert off.any() and (off <= sum_bound(*each[:3], -(-len(each[0]) // 32), each[3], **options)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_that_is_not_row_after_row(dtype):
    """Its gradient was scrambled, without a word."""
    hidden, weight, targets, _ = head(40, 8, 203, dtype)
    across = weight.detach().T.contiguous().T.requires_grad_()
    (found,) = interpreted([("head_bodies:loss_and_gradients", (hidden, across, targets), {})])
    assert max(errors(found, exact(hidden, weight, targets))) < (2e-6 if dtype == torch.float32 else 3e-3)


def test_a_tied_weight_adds_up_over_micro_batches():
    _, weight, _, _ = head(1, 16, 203, torch.float16)
    batches, wide = [torch.randint(203, (2, 40)).unbind() for _ in range(2)], weight.detach().double().requires_grad_()
    for tokens, targets in batches:
        torch.nn.functional.cross_entropy(wide[tokens] @ wide.T, targets).backward()
    calls = [("head_bodies:tied", (weight.detach().clone().requires_grad_(), batches), way)
             for way in ({}, {"weight_gradient": torch.float16})]
    assert max(errors(interpreted(calls), [wide.grad] * 2)) < 4e-3


def test_several_losses_are_their_weighted_sum_and_have_one_gradient_of_the_weight():
    given = [head(n, 8, 70, seed=n, bias=True) for n in (20, 33, 7)]
    _, weight, _, bias = given[0]
    hiddens, targets, scales = [each[0] for each in given], [each[2] for each in given], (1.0, 0.3, -0.5)
    found = interpreted([("head_bodies:several", (hiddens, weight, targets, scales, bias), {"reduction": reduction})
                         for reduction in ("mean", "sum")])
    for reduction, results in zip(("mean", "sum"), found, strict=True):
        wide = [x.detach().double().requires_grad_() for x in (weight, bias, *hiddens)]
        apart = torch.stack([plain(h, wide[0], t, bias=wide[1], reduction=reduction)
                             for h, t in zip(wide[2:], targets, strict=True)])
        total = (apart * torch.tensor(scales, dtype=torch.float64)).sum()
        assert max(errors(results, [*with_gradients(total, *wide), apart.detach()])) < 2e-6


def test_a_split_vocabulary_is_the_whole_one():
    """On two ranks, whose kernels are interpreted; 203 and 401 words, which two do not divide."""
    cases = [((40, 8, 203), torch.float32, 1, EVERYTHING), ((33, 8, 401), torch.float16, 3, {"reduction": "sum"}),
             ((20, 8, 90), torch.float32, 1, {"ignore_index": 60})]
    (ranks,) = interpreted([("head_bodies:on_ranks", (2, cases), {})])
    for rank, answers in enumerate(ranks):
        for ((N, C, V), dtype, parts, options), (wrong, taken, sent) in zip(cases, answers, strict=True):
            smoothing, v = options.get("label_smoothing", 0), (rank + 1) * V // 2 - rank * V // 2
            form = fused_cross_entropy_bytes(N, v, C, dtype, bias=True, parts=parts, split=True,
                                             label_smoothing=smoothing, softcap=options.get("softcap"))
            assert max(wrong) < (2e-6 if dtype == torch.float32 else 2e-3)
            assert taken == (form.saved, form.forward, form.peak)
            rows = split_cross_entropy_traffic(N, C, rank, 2, chunk_size=N, label_smoothing=smoothing,
                                               hidden_needs=False)["all_reduce"]
            dh = ring_traffic("all_reduce", N * C * dtype.itemsize, 2, rank, dtype.itemsize)
            assert sent == Traffic(all_reduce=parts * (rows + dh))


def test_a_large_head_in_a_dry_run():
    """Llama-3-8B's: kernels that do not run take what they would."""
    N, V, C, dtype = 8192, 128256, 4096, torch.bfloat16
    def step():
        hidden, weight = (torch.empty(n, C, dtype=dtype, requires_grad=True) for n in (N, V))
        fused_linear_cross_entropy(hidden, weight, torch.zeros(N, dtype=torch.int64)).backward()

    form = fused_cross_entropy_bytes(N, V, C, dtype)
    assert memory.dry_run(step).peak.total == form.peak + (N + V) * C * 2 + N * 8
    assert form.forward < 2**22 and form.peak < N * V * 4


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"skip": -1e-3}, ValueError, "skip=-0.001: expected a number of at least 0"),
    ({"dtype": torch.float64}, TypeError, "float64.*chunked_linear_cross_entropy takes"),
    ({"dtype": torch.bfloat16}, (ValueError, RuntimeError), "TRITON_INTERPRET"),
    ({"reduction": "none"}, ValueError, "'none'"), ({"target": 20}, IndexError, "targets hold 20")])
def test_bad_input_is_named(change, error, words):
    hidden, weight, targets, _ = head(10, 8, 20, change.pop("dtype", torch.float32), ignored=0)
    targets[3] = change.pop("target", 0)
    with pytest.raises(error, match=words):
        fused_linear_cross_entropy(hidden, weight, targets, **change)


def test_a_bias_alone_is_refused():
    hidden, weight, targets, bias = head(10, 8, 20, bias=True)
    with pytest.raises(ValueError, match="bias needs a gradient"):
        fused_linear_cross_entropy(hidden, weight.detach(), targets, bias=bias)
