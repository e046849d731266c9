"""Each algorithm on one tensor: what is sent is exact, as small as its closed form, and what is left is kept."""

import functools

import pytest
import torch
from compression_kit import FLAT

from refimpl.compression import ALGORITHMS, GradientCompressor
from refimpl.compression.powersgd import FactorLayout

SHAPES = [(), (1,), (3,), (7,), (257,), (1025,), (64, 48), (3, 5, 7), (4097,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every = pytest.mark.parametrize("algorithm", ALGORITHMS)


def compressor(algorithm, ratio=0.1, *args, **how):
    return GradientCompressor(algorithm, ratio, *args, **how)


def test_the_class_is_named_where_users_look():
    made = GradientCompressor(algorithm="topk", ratio=0.01, error_feedback=True)
    assert (made.algorithm, made.ratio, made.error_feedback) == ("topk", 0.01, True)


def test_unless_it_is_said_one_number_of_a_hundred_is_sent():
    assert GradientCompressor().compress(torch.randn(5000)).nbytes == 50 * 8  # a float and its place


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_payload_has_the_bytes_of_its_closed_form(algorithm, shape, dtype):
    made, x = compressor(algorithm), torch.randn(shape).to(dtype)
    payload = made.compress(x)
    assert payload.nbytes == payload.data.untyped_storage().nbytes() == made.payload_bytes(shape, dtype.itemsize)
    back = made.decompress(payload)
    assert back.shape == x.shape and back.dtype == dtype and back.isfinite().all()


def test_bytes_are_those_of_the_formulas():
    n, k = 100_000, 1000
    expected = {"topk": k * 8, "threshold": k * 8, "random": k * 4, "int8": n + 4 * 391, "sign": n // 8 + 4 * 98}
    for algorithm, nbytes in expected.items():
        assert compressor(algorithm, 0.01).compress(torch.randn(n)).nbytes == nbytes < 4 * n / 3
    assert compressor("powersgd", rank=2).compress(torch.randn(250, 400)).nbytes == 4 * 2 * 650


class Articles(GradientCompressor):
    """The articles' compressor, a mutant: it sends all values, zeros where a value was left out, and int64 indices."""

    def compress(self, x, key=0):
        size = x.abs().view(-1)
        places = size.topk(max(1, round(self.ratio * x.numel()))).indices  # int64
        values = torch.zeros_like(size)
        values[places] = x.view(-1)[places]
        return [values, places]


def test_the_articles_compressor_sends_120_percent():
    x = torch.randn(10_000)
    values, places = Articles("topk", 0.1).compress(x)
    assert values.nbytes + places.nbytes == 1.2 * x.nbytes and places.dtype is torch.int64
    ours = compressor("topk", 0.1)
    payload = ours.compress(x)
    assert payload.nbytes == 0.2 * x.nbytes and torch.equal(ours.decompress(payload), values)


@pytest.mark.parametrize("algorithm", ["topk", "threshold", "random"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_sent_arrive_exactly(algorithm, dtype):
    x, made = torch.randn(5000).to(dtype), compressor(algorithm)
    back = made.decompress(made.compress(x))
    sent = back != 0
    assert sent.sum() == 500 and torch.equal(back[sent], x[sent])
    kept = made.kept[0]["residual"]
    assert torch.equal((kept + back.to(kept.dtype)).to(dtype), x) and not kept[sent].any()


def test_topk_sends_the_largest_and_threshold_nearly():
    x = torch.randn(50_000)
    largest = x.abs().topk(5000).values.sum()
    for algorithm, least in (("topk", 1), ("threshold", 0.97), ("random", 0.2)):
        made = compressor(algorithm)
        share = made.decompress(made.compress(x)).abs().sum() / largest
        assert least - 1e-5 <= share <= 1 + 1e-5, algorithm


def test_int8_and_sign_are_as_near_as_their_steps():
    x = torch.randn(3000)
    back = {name: (made := compressor(name)).decompress(made.compress(x)) for name in ("int8", "sign")}
    for block, ours in zip(x.split(256), back["int8"].split(256), strict=True):
        assert (block - ours).abs().max() <= block.abs().max() / 127 / 2 * 1.001
    for block, ours in zip(x.split(1024), back["sign"].split(1024), strict=True):
        torch.testing.assert_close(ours, block.abs().mean() * block.sign())


@every
def test_zeros_stay_zeros(algorithm):
    for shape in SHAPES:
        made = compressor(algorithm)
        for _ in range(2):
            assert not made.decompress(made.compress(torch.zeros(shape))).any()


@every
def test_a_tensor_without_elements(algorithm):
    made = compressor(algorithm)
    payload = made.compress(torch.zeros(0))
    assert payload.nbytes == made.payload_bytes((0,)) == 0 and made.decompress(payload).shape == (0,)


@every
@pytest.mark.parametrize("n", [1, 2, 9])
def test_at_least_one_number_is_sent(algorithm, n):
    made = compressor(algorithm, 0.001)
    assert made.compress(torch.ones(n)).nbytes == made.payload_bytes((n,)) > 0
    assert made.decompress(made.compress(torch.ones(n))).any()


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_and_not_kept(algorithm, bad):
    made, x = compressor(algorithm), torch.randn(40, 50)
    made.compress(x)
    before = {name: kept.clone() for name, kept in made.kept[0].items()}
    broken = x.clone()
    broken[7, 3] = bad
    assert not made.decompress(made.compress(broken)).isfinite().all()
    assert all(kept.isfinite().all() for kept in made.kept[0].values())
    assert torch.equal(before["residual"], made.kept[0]["residual"])
    assert made.decompress(made.compress(x)).isfinite().all()


@every
def test_the_first_gradient_may_be_not_finite(algorithm):
    made = compressor(algorithm)
    made.compress(torch.full((40, 50), float("nan")))
    assert made.decompress(made.compress(torch.randn(40, 50))).any()


@every
def test_what_is_left_out_is_added_in_the_next_step(algorithm):
    x, y = torch.randn(40, 50), torch.randn(40, 50)
    made, forgetful = compressor(algorithm), compressor(algorithm, error_feedback=False)
    first = made.decompress(made.compress(x))
    torch.testing.assert_close(made.kept[0]["residual"].view(40, 50), x - first)
    again, theirs = made.decompress(made.compress(y)), forgetful.decompress(forgetful.compress(x))
    torch.testing.assert_close(made.kept[0]["residual"].view(40, 50), x + y - first - again)
    assert torch.equal(first, theirs) and "residual" not in forgetful.kept.get(0, {})


@every
def test_two_runs_are_the_same(algorithm):
    runs = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        made = compressor(algorithm)
        for step in range(3):
            runs.append(made.compress(torch.arange(2000.0).sin().view(40, 50) + step).data)
            made.step()
    assert all(torch.equal(a, b) for a, b in zip(runs[:3], runs[3:], strict=True))


def test_random_draws_other_places_in_each_step_and_for_each_gradient():
    made, x = compressor("random", error_feedback=False), torch.ones(1000)
    drawn = []
    for key in (0, 1):
        for _ in range(2):
            drawn.append(made.decompress(made.compress(x, key)).nonzero().view(-1).tolist())
            made.step()
    assert len(set(map(tuple, drawn))) == 4 and all(len(set(each)) == 100 for each in drawn)


@pytest.mark.parametrize("algorithm", FLAT)
def test_keys_tell_gradients_apart(algorithm):
    made = compressor(algorithm)
    made.compress(torch.ones(10), "a"), made.compress(torch.ones(20), "b")
    with pytest.raises(ValueError, match="give each gradient a key of its own"):
        made.compress(torch.ones(20), "a")


def test_factors_are_chosen_by_the_ratio():
    for ratio in (0.01, 0.1, 0.3):
        layout = FactorLayout([torch.Size((300, 200)), torch.Size((50,))], ratio)
        (n, m, r), = layout.matrices.values()
        assert r == max(1, int(ratio * 60_000 / 500)) and layout.payload_bytes() == 4 * (50 + r * (n + m))
        assert r == 1 or r * (n + m) <= ratio * n * m


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_ratios_out_of_range(ratio):
    with pytest.raises(ValueError, match="ratio=.*above 0 and at most 1"):
        GradientCompressor("topk", ratio=ratio)


@pytest.mark.parametrize(("arguments", "match"), [
    ({"algorithm": "top-k"}, "algorithm='top-k': expected one of topk, threshold"),
    ({"warmup": -1}, "warmup=-1"), ({"seed": 0.5}, "seed=0.5"), ({"algorithm": "powersgd", "rank": 0}, "rank=0"),
    ({"rank": 2}, "powersgd alone")])
def test_other_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        GradientCompressor(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64])
def test_gradients_that_are_no_floats(dtype):
    with pytest.raises(TypeError, match="expected floats, such as torch.float32"):
        compressor("topk").compress(torch.ones(10).to(dtype))


@every
def test_a_ratio_of_one_sends_all_that_it_can(algorithm):
    x = torch.randn(64, 48)
    made = compressor(algorithm, 1.0)
    back = made.decompress(made.compress(x))
    assert torch.allclose(back, x, rtol=1.3e-6, atol=1e-5) == (algorithm not in ("int8", "sign"))


def test_the_residual_is_in_units_of_the_loss_and_not_of_its_scale():
    scale, x = [1024.0], torch.randn(100)
    scaled, plain = compressor("topk", loss_scale=functools.partial(scale.__getitem__, 0)), compressor("topk")
    for value in (1024.0, 1024.0, 512.0, 2048.0):
        scale[0] = value
        back, expected = scaled.decompress(scaled.compress(x * value)), plain.decompress(plain.compress(x))
        torch.testing.assert_close(back / value, expected)
        torch.testing.assert_close(scaled.kept[0]["residual"], plain.kept[0]["residual"])
