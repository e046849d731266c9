"""The answer fits by the dry run, and 64 tokens more do not: whatever the budget."""

import time

import pytest
import torch

from refimpl.model import GPTConfig
from refimpl.sequence_length import longest_sequence, training_step_bytes

CASES = {
    "gpt2, dense": ("gpt2", 2, {}),
    "gpt2, dense, one row, bf16": ("gpt2", 1, {"dtype": torch.bfloat16}),
    "gpt2, flash": ("gpt2", 3, {"attention": "flash"}),
    "gpt2, dense, recomputed": ("gpt2", 2, {"recompute": True}),
    "gpt2, flash, recomputed": ("gpt2", 2, {"attention": "flash", "recompute": True, "optimizer": "sgd"}),
    "llama, dense, bf16": ("llama", 2, {"dtype": torch.bfloat16}),
    "llama, flash, recomputed": ("llama", 4, {"attention": "flash", "recompute": True}),
    "neox, dense, dropout": ("neox", 2, {"optimizer": "momentum"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_fits_and_64_tokens_more_do_not(peak, family, case):
    """The budgets are the tightest there are: to the byte what a sequence takes, and one byte less."""
    name, batch, step = CASES[case]
    config = family(name, layers=2, dropout=0.1 if "dropout" in case else 0.0)
    at = {s: peak(config, batch, s, **step) for s in (512, 576)}
    for budget, expected in ((at[512], 512), (at[512] - 1, 448), (at[576] - 1, 512)):
        found = longest_sequence(config, budget, batch, **step)
        assert (found.sequence, found.limit) == (expected, "budget")
        assert found.peak == at.get(expected, found.peak) <= budget < at[expected + 64]
        assert found.polynomial(expected) == found.peak
        assert (found.polynomial.a > 0) == (step.get("attention") != "flash" and "step" not in found.moment)


@pytest.mark.parametrize(("name", "step"), [("gpt2", {}), ("gpt2", {"attention": "flash"}), ("llama", {})])
def test_a_model_that_grows_with_its_context(peak, family, name, step):
    at = {s: peak(family(name, layers=1, context_length=s), 2, s, **step) for s in (1152, 1216)}
    config = family(name, layers=1, context_length=128)
    for budget, expected in ((at[1152], 1152), (at[1216] - 1, 1152), (at[1216], 1216)):
        found = longest_sequence(config, budget, 2, grow=True, **step)
        assert found.sequence == expected and found.peak == at[expected]
    found = longest_sequence(config, at[1152], 2, **step)
    assert (found.sequence, found.limit) == (128, "context length")


@pytest.mark.parametrize(("attention", "dtype"), [("dense", torch.float32), ("flash", torch.bfloat16)])
def test_in_chunks(peak, family, attention, dtype):
    """A thousandth is left to what is not counted, and a chunk more does not fit."""
    config, step = family("gpt2", layers=1), {"attention": attention, "dtype": dtype, "chunk_size": 128}
    budget = 1.001 * peak(config, 2, 512, **step)
    found = longest_sequence(config, budget, 2, **step)
    assert found.sequence == 512 and found.peak == pytest.approx(budget, rel=0.002) and found.polynomial.a == 0
    assert peak(config, 2, 640, **step) > budget
    assert longest_sequence(config, budget, 2, attention=attention, dtype=dtype).sequence < 512


def test_below_two_chunks_it_is_a_plain_step(family):
    one = training_step_bytes(family("gpt2"), 2, 64)
    assert training_step_bytes(family("gpt2"), 2, 64, chunk_size=64) == one
    found = longest_sequence(family("gpt2"), one.total, 2, chunk_size=64)
    assert found.sequence == 64 and found.peak == one.total


def test_a_version_that_saves_nothing_does_not_fit(peak, family):
    """Dense attention, all blocks kept, at what the others answer."""
    config, answers = family("gpt2", layers=2, vocab_size=50), {}
    budget = peak(config, 2, 256)
    for step in ({"recompute": True}, {"attention": "flash"}, {"attention": "flash", "recompute": True}):
        answers[*step] = longest_sequence(config, budget, 2, **step).sequence
        assert peak(config, 2, answers[*step], **step) <= budget < peak(config, 2, answers[*step])
    assert 256 < answers["recompute",] and 256 < answers["attention",] < answers["attention", "recompute"]


@pytest.mark.alone
def test_published_models_are_answered_in_milliseconds(peak):
    short = GPTConfig.named("gpt2", layers=2)  # the whole vocabulary; more layers are a multiplication, see test_step
    found = longest_sequence(short, 2 * 2**30, 4, multiple=1)
    assert found.peak == peak(short, 4, found.sequence) <= 2 * 2**30 < peak(short, 4, found.sequence + 1)
    config = GPTConfig.named("gpt2")
    began = time.perf_counter()
    found = longest_sequence(config, 8 * 2**30, 4, multiple=1)
    assert time.perf_counter() - began < 1, "it runs something"
    text = str(found)
    assert f"4 × {found.sequence} tokens: 8.0 GiB of 8.0 GiB, limited by the budget" in text and "·s²" in text


def test_more_rows_are_shorter_ones(family):
    config, budget = family("gpt2", context_length=100_000), 10**9
    lengths = [longest_sequence(config, budget, rows, multiple=1).sequence for rows in (1, 2, 4, 8)]
    assert lengths == sorted(lengths, reverse=True) and 1.8 < lengths[0] ** 2 / lengths[1] ** 2 < 2.2


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_name_is_no_config():
    with pytest.raises(TypeError, match="config='gpt2': expected a GPTConfig"):
        longest_sequence("gpt2", 2**30, 1)


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), 10**400, None, "8 GiB", True])
def test_budgets_that_are_none(family, budget):
    with pytest.raises(ValueError, match="budget=.*: expected bytes, a number above 0"):
        longest_sequence(family("gpt2"), budget, 2)


def test_a_budget_too_small_names_the_smallest(family):
    config = family("gpt2")
    least = training_step_bytes(config, 2, 64).total
    with pytest.raises(ValueError, match=f"2 × 64 tokens take {least:,} bytes, .*, the smallest feasible budget"):
        longest_sequence(config, least - 1, 2)
    assert longest_sequence(config, least, 2).sequence == 64
    one = training_step_bytes(config, 2, 1).total
    assert longest_sequence(config, one, 2, multiple=1).sequence >= 1
    with pytest.raises(ValueError, match=f"2 × 1 tokens take {one:,} bytes"):
        longest_sequence(config, one - 1, 2, multiple=1)


@pytest.mark.parametrize(("options", "message"), [
    ({"attention": "sparse"}, "attention='sparse': expected one of 'dense', 'flash'"),
    ({"dtype": torch.float64}, "dtype=torch.float64: expected one of torch.float32, torch.bfloat16"),
    ({"optimizer": "lion"}, "optimizer='lion': expected one of"),
    ({"gradient": "none", "chunk_size": 64}, "gradient='none': expected one of 'full', 'truncated'"),
    ({"chunk_size": 0}, "chunk_size=0: expected an integer of at least 1"),
    ({"chunk_size": "64"}, "chunk_size='64': expected an integer of at least 1"),
    ({"recompute": 2}, "recompute=2: expected one of True, False"),
    ({"grow": "no"}, "grow='no': expected one of True, False"),
    ({"multiple": 0}, "multiple=0: expected an integer of at least 1"),
    ({"multiple": 2048}, "multiple=2048: the context has 1024 tokens"),
    ({"multiple": 100, "chunk_size": 64}, "multiple=100: expected one of chunk_size=64"),
    ({"device": "mps"}, "device='mps': what its kernels keep is not known"),
])
def test_options_that_are_not_known(family, options, message):
    with pytest.raises(ValueError, match=message):
        longest_sequence(family("gpt2"), 10**9, 2, **options)
    if "multiple" not in options:
        with pytest.raises(ValueError, match=message):
            training_step_bytes(family("gpt2"), 2, 64, **options)
    with pytest.raises(TypeError, match="last"):  # of the form, not of its users
        longest_sequence(family("gpt2"), 10**9, 2, last=3)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_batches_that_are_none(family, batch):
    with pytest.raises(ValueError, match="batch=.*: expected an integer of at least 1"):
        longest_sequence(family("gpt2"), 10**9, batch)


def test_shapes_that_the_model_has_not(family):
    with pytest.raises(ValueError, match="sequence=1025: the context has 1024 tokens; grow=True extends it"):
        training_step_bytes(family("gpt2"), 2, 1025)
    with pytest.raises(ValueError, match="sequence=0: expected an integer of at least 1"):
        training_step_bytes(family("gpt2"), 2, 0)
    with pytest.raises(ValueError, match="'flash' with dropout=0.1: on a CPU the fused kernel has none"):
        training_step_bytes(family("gpt2", dropout=0.1), 2, 64, attention="flash")


def test_on_cuda_dropout_masks_are_booleans(family):
    config = family("gpt2", dropout=0.1)
    assert (training_step_bytes(config, 2, 512, device="cuda").total < 0.9 * training_step_bytes(config, 2, 512).total)
    assert training_step_bytes(config, 2, 512, attention="flash", device="cuda").total > 0
