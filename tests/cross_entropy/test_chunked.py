"""Loss and gradients are those of the logits in every dtype, and no worse; bad input; several losses; split columns."""

import itertools

import pytest
import torch
from head_kit import EVERYTHING, errors, exact, head, plain, read, split_columns, with_gradients
from rank_pool import pooled

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.cross_entropy.chunked import chunked_linear_cross_entropy, default_chunk_size, multi_token_cross_entropy
from refimpl.cross_entropy.closed_forms import chunked_cross_entropy_bytes, split_cross_entropy_traffic

V_SPLIT = 101  # no number of ranks divides it


@pytest.mark.core
@pytest.mark.parametrize(("options", "reduction", "chunk_size", "bias"), [*itertools.product(
    [{}, EVERYTHING], ["mean", "sum"], [1, 7, 64, None], [False, True])])
def test_numbers_are_those_of_the_logits(options, reduction, chunk_size, bias):
    hidden, weight, targets, b = head(37, 16, 101, torch.float64, bias=bias)
    options = options | {"reduction": reduction}
    loss = chunked_linear_cross_entropy(hidden, weight, targets, bias=b, chunk_size=chunk_size, **options)
    found, expected = with_gradients(loss * 3, hidden, weight, b), exact(hidden, weight, targets, b, **options)
    assert max(errors([x / 3 for x in found], expected)) < 1e-13  # an upstream gradient that is not 1


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_the_plain_ones(dtype, options):
    """Root mean square over six draws; the plain head multiplies, and rounds its gradients, in the same dtype."""
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(6):
        hidden, weight, targets, _ = head(256, 64, 503, dtype, seed=seed, ignored=0)
        reference = exact(hidden, weight, targets, **options)
        for k, loss in enumerate((chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=32, **options),
                                  plain(hidden, weight, targets, **options))):
            found = with_gradients(loss, hidden, weight)
            assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
            sums[k] += torch.stack([(a.double() - b).square().mean() for a, b in zip(found, reference, strict=True)])
    ours, theirs = sums.sqrt()
    assert (ours[1:] <= theirs[1:] * 1.02).all(), ours / theirs
    assert ours[0] <= theirs[0] * 1.02 + 1e-7 * 6


def test_gradients_of_small_means_do_not_vanish_in_fp16():
    """1/n of 65,536 rows times a softmax is under fp16's smallest number; the caller's loss scale comes in backward."""
    hidden, weight, targets, _ = head(4096, 8, 64, torch.float16, ignored=0)
    found = with_gradients(chunked_linear_cross_entropy(hidden, weight, targets) * 2.0**14, hidden, weight)
    assert max(errors([x / 2.0**14 for x in found], exact(hidden, weight, targets))) < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_targets_ignored_is_zero(reduction):
    hidden, weight, targets, bias = head(10, 4, 7, bias=True, ignored=1)
    loss = chunked_linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    assert all((x == 0).all() for x in with_gradients(loss, hidden, weight, bias))


def test_no_tokens_at_all():
    hidden, weight, targets, _ = head(0, 4, 7)
    found = with_gradients(chunked_linear_cross_entropy(hidden, weight, targets), hidden, weight)
    assert found[0] == 0 and found[1].shape == (0, 4) and (found[2] == 0).all()


def test_shapes_ids_and_another_ignored_id():
    hidden, weight, targets, _ = head(24, 8, 31)
    targets = targets.where(targets >= 0, 3)
    expected = with_gradients(plain(hidden, weight, targets, 3), hidden, weight)
    folded = chunked_linear_cross_entropy(hidden.view(2, 3, 4, 8), weight, targets.int().view(2, 3, 4), 3, chunk_size=5)
    found = with_gradients(folded, hidden, weight)
    assert max(errors(found, [x.double() for x in expected])) < 1e-5


def test_what_needs_no_gradient_has_none_and_takes_no_bytes():
    for hidden_needs, weight_needs in itertools.product([False, True], repeat=2):
        hidden, weight, targets, _ = head(40, 8, 61, needs=False)
        hidden.requires_grad_(hidden_needs), weight.requires_grad_(weight_needs)
        loss = chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16)
        assert loss.requires_grad == (hidden_needs or weight_needs)
        if loss.requires_grad:
            loss.backward()
        assert (hidden.grad is None, weight.grad is None) == (not hidden_needs, not weight_needs)
        with torch.no_grad(), memory.track(hidden, weight, targets) as t:
            chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16)
        form = chunked_cross_entropy_bytes(40, 61, 8, chunk_size=16, hidden_needs=False, weight_needs=False)
        assert t.peak.total - t.start.total == form.forward


def test_autocast_rounds_the_weights_gradient_nowhere():
    hidden, weight, targets, _ = head(64, 16, 101)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=16)
    found = with_gradients(loss, hidden, weight)
    assert [x.dtype for x in found] == [torch.float32] * 3
    rounded = [x.detach().bfloat16() for x in (hidden, weight)]
    assert errors(found, exact(*rounded, targets))[2] < 4e-3 and not torch.equal(found[2], found[2].bfloat16().float())


BAD = {
    "a target outside": (lambda a: a["targets"].__setitem__(3, 31), IndexError, "hold 31: the vocabulary is 0…30"),
    "a negative target": (lambda a: a["targets"].__setitem__(3, -1), IndexError, "targets hold -1"),
    "float targets": (lambda a: a.update(targets=a["targets"].float()), TypeError, "ids in int64 or int32"),
    "other lengths": (lambda a: a.update(targets=a["targets"][:5]), ValueError, r"expected \(…, C\), \(V, C\) and"),
    "other features": (lambda a: a.update(weight=a["weight"][:, :7]), ValueError, r"weight \(31, 7\)"),
    "a bias of C": (lambda a: a.update(bias=torch.zeros(8)), ValueError, r"bias \(8,\)"),
    "two dtypes": (lambda a: a.update(weight=a["weight"].bfloat16()), TypeError, "bfloat16.*expected one dtype"),
    "integers": (lambda a: a.update(weight=a["weight"].long(), hidden=a["hidden"].long()), TypeError, "int64"),
    "no reduction": (lambda a: a.update(reduction="none"), ValueError, "'none': expected 'mean' or 'sum'"),
    "no chunk": (lambda a: a.update(chunk_size=0), ValueError, "chunk_size=0"),
    "smoothing": (lambda a: a.update(label_smoothing=2), ValueError, "label_smoothing=2")}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_named(fault):
    change, error, words = BAD[fault]
    arguments = dict(zip(("hidden", "weight", "targets"), head(24, 8, 31, needs=False, ignored=0), strict=False))
    change(arguments)
    with pytest.raises(error, match=words):
        chunked_linear_cross_entropy(**arguments)


def test_second_backwards_are_refused():
    hidden, weight, targets, _ = head(24, 8, 31)
    loss, other = (chunked_linear_cross_entropy(hidden, weight, targets) for _ in range(2))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(other, weight, create_graph=True)


def test_default_chunks_are_as_large_as_hidden():
    assert default_chunk_size(8192, 50257, 768) == 256 and default_chunk_size(8192, 128256, 4096) == 512
    assert default_chunk_size(100, 50257, 768) == 100 and default_chunk_size(1 << 20, 1000, 64) == 1 << 17


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_several_losses_are_their_weighted_sum(reduction):
    parts = [head(n, 8, 31, torch.float64, seed=n) for n in (20, 33, 7)]
    weight, scales = parts[0][1], (1.0, 0.3, -0.5)
    hiddens, targets = [p[0] for p in parts], [p[2] for p in parts]
    apart = [plain(h, weight, t, reduction=reduction) for h, t in zip(hiddens, targets, strict=True)]
    expected = with_gradients(sum(s * loss for s, loss in zip(scales, apart, strict=True)), weight, *hiddens)
    total, losses = multi_token_cross_entropy(hiddens, weight, targets, scales, reduction=reduction, chunk_size=8)
    assert max(errors(with_gradients(total, weight, *hiddens), expected)) < 1e-13
    assert not losses.requires_grad and max(errors([losses], [torch.stack(apart).detach()])) < 1e-13


def test_the_losses_apart_are_without_their_scales_where_no_scale_is_one():
    parts = [head(n, 8, 31, torch.float64, seed=n) for n in (20, 7)]
    hiddens, targets = [p[0] for p in parts], [p[2] for p in parts]
    apart = torch.stack([plain(h, parts[0][1], t).detach() for h, t in zip(hiddens, targets, strict=True)])
    _, losses = multi_token_cross_entropy(hiddens, parts[0][1], targets, (0.3, 0.5))
    assert max(errors([losses], [apart])) < 1e-13


def test_several_losses_have_one_gradient_of_the_weight():
    """Three calls hold three of them: V · C · 4 bytes each."""
    N, C, V, K = 32, 16, 997, 3
    hidden, weight, targets, _ = head(N, C, V)
    hiddens = [hidden.detach().clone().requires_grad_() for _ in range(K)]
    given = [*hiddens, weight, targets]
    together = read(lambda: multi_token_cross_entropy(hiddens, weight, [targets] * K, chunk_size=8)[0], *given)
    apart = read(lambda: sum(chunked_linear_cross_entropy(h, weight, targets, chunk_size=8) for h in hiddens), *given)
    form = chunked_cross_entropy_bytes(N, V, C, chunk_size=8, parts=K)
    assert together == (form.saved, form.forward, form.peak)
    assert apart[0] - together[0] >= (K - 1) * V * C * 4


@pytest.mark.parametrize(("hiddens", "scales", "words"), [
    (1, (1.0,), "1 hidden states, 2 targets"), (2, (1.0,), "1 scales"), (2, (1.0, 0.0), "leave that loss out"),
    (2, (1.0, float("nan")), "expected finite numbers")])
def test_several_losses_refused(hiddens, scales, words):
    hidden, weight, targets, _ = head(6, 8, 31)
    with pytest.raises(ValueError, match=words):
        multi_token_cross_entropy([hidden] * hiddens, weight, [targets] * 2, scales)


def alone(hiddens, weight, targets, **options):
    """One loss, called as several are."""
    loss = chunked_linear_cross_entropy(hiddens[0], weight, targets[0], chunk_size=16, **options)
    return loss, [loss.detach()]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"ignore_index": 60}], ids=["", "everything", "a word"])
def test_a_split_vocabulary_is_the_whole_one(n, options):
    found = pooled(split_columns, n, (37, 16, V_SPLIT), torch.float64, 1, options, alone)
    for rank, (wrong, taken, sent) in enumerate(found):
        v = (rank + 1) * V_SPLIT // n - rank * V_SPLIT // n
        chosen = {name: value for name, value in options.items() if name in ("label_smoothing", "softcap")}
        form = chunked_cross_entropy_bytes(37, v, 16, torch.float64, chunk_size=16, bias=True, split=True, **chosen)
        assert max(wrong) < 1e-12 and taken == (form.saved, form.forward, form.peak)
        assert sent == split_cross_entropy_traffic(37, 16, rank, n, torch.float64, chunk_size=16,
                                                   label_smoothing=options.get("label_smoothing", 0))


def test_label_smoothing_has_one_sum_a_row_more():
    """On two ranks an all_reduce sends a tensor's own bytes."""
    without, smooth = (split_cross_entropy_traffic(64, 8, 0, 2, chunk_size=16, **options).total
                       for options in ({}, {"label_smoothing": 0.1}))
    assert without == 64 * (1 + 3) * 4 + 64 * 8 * 4 and smooth == without + 64 * 4


def test_a_chunk_s_logits_are_gone_when_ranks_add_up_the_gradient_of_hidden(monkeypatch):
    comm, there = FakeCommunicator(0, 2), []
    add_up = comm.all_reduce
    def all_reduce(x, *args, label, **options):
        if label == "gradient of hidden":
            there.append(t.now.total)
        return add_up(x, *args, label=label, **options)
    monkeypatch.setattr(comm, "all_reduce", all_reduce)
    hidden, weight, targets, _ = head(64, 8, 500)
    with memory.track(hidden, weight, targets) as t:
        loss = chunked_linear_cross_entropy(hidden, weight, targets, comm=comm, vocabulary=1000)
    assert there[0] - t.now.total < 64 * 500 * 4 / 10, loss
