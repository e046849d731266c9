"""The answer fits by a dry run of its own, and 64 tokens more do not: whatever the model and the budget."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from training_step import train

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.memory import training_step_bytes
from refimpl.model import GPT, GPTConfig
from refimpl.sequence_length import Quadratic, carried_bytes, longest, longest_sequence

CASES = {
    "gpt2, dense": ("gpt2", 2, {}), "gpt2, dense, one row, bf16": ("gpt2", 1, {"dtype": torch.bfloat16}),
    "gpt2, flash": ("gpt2", 3, {"attention": "flash"}),
    "gpt2, dense, recomputed": ("gpt2", 2, {"recompute_blocks": True}),
    "gpt2, flash, recomputed": ("gpt2", 2, {"attention": "flash", "recompute_blocks": True, "optimizer": "sgd"}),
    "llama, dense, bf16": ("llama", 2, {"dtype": torch.bfloat16}),
    "llama, flash, recomputed": ("llama", 4, {"attention": "flash", "recompute_blocks": True}),
    "neox, dense, dropout": ("neox", 2, {"optimizer": "momentum"}),
    "neox, flash": ("neox", 2, {"attention": "flash", "optimizer": "sgd"})}


@pytest.fixture(autouse=True)
def dry_runs(monkeypatch):
    """Each dry run of a step is made once in a test, and counted."""
    made = cache(longest._DryRun)
    monkeypatch.setattr(longest, "_DryRun", made)
    return made


def peak_of(step, sequence, *args):
    """By a dry run that the search knows nothing of."""
    return memory.dry_run(step, sequence, *args).peak.total


@pytest.mark.parametrize("case", CASES)
def test_the_answer_fits_and_64_tokens_more_do_not(family, dry_runs, case):
    """The budgets are the tightest there are: to the byte what a sequence takes, and one byte less."""
    name, batch, options = CASES[case]
    step = partial(train, family(name, layers=2, dropout=0.1 if "dropout" in case else 0.0), batch, **options)
    at = {s: peak_of(step, s) for s in (704, 768)}
    for budget, expected in ((at[704], 704), (at[704] - 1, 640), (at[768] - 1, 704)):
        found = longest_sequence(step, budget, longest=1024)
        assert (found.sequence, found.limit) == (expected, "budget")
        assert found.peak == at.get(expected, found.peak) <= budget < at[expected + 64]
        assert found.polynomial(expected) == found.peak == found.dry_runs[expected]
        assert [*found.dry_runs] == [256, 384, 512, expected, expected + 64]
        assert (found.polynomial.a > 0) == (options.get("attention") != "flash")
    assert dry_runs.cache_info().currsize == 6


@pytest.mark.parametrize(("name", "step"), [("gpt2", {}), ("gpt2", {"attention": "flash"}), ("llama", {})])
def test_a_model_that_grows_with_its_context(family, name, step):
    def growing(s):
        train(family(name, layers=1, context_length=s), 2, s, **step)

    at = {s: peak_of(growing, s) for s in (1152, 1216)}
    for budget, expected in ((at[1152], 1152), (at[1216] - 1, 1152), (at[1216], 1216)):
        found = longest_sequence(growing, budget)
        assert found.sequence == expected and found.peak == at[expected]
    short = family(name, layers=1, context_length=128)
    found = longest_sequence(partial(train, short, 2, **step), at[1152], longest=128)
    assert (found.sequence, found.limit) == (128, "longest") and "limited by the longest" in str(found)


@pytest.mark.parametrize(("attention", "dtype"), [("dense", torch.float32), ("flash", torch.bfloat16)])
def test_in_chunks(family, attention, dtype):
    """More operations for a longer sequence, so the peaks are fitted: the answer is as tight."""
    config = family("gpt2", layers=1)
    step = partial(train, config, 2, attention=attention, dtype=dtype, chunk_size=128, optimizer="sgd")
    at = {s: peak_of(step, s) for s in (640, 704)}
    for budget, expected in ((at[640], 640), (at[704] - 1, 640)):
        found = longest_sequence(step, budget, longest=1024)
        assert found.sequence == expected and found.peak == at[640]
        assert found.polynomial is None or found.polynomial.a == 0
    assert found.ledger["keys and values"] == 2 * carried_bytes(config, 2, 640, dtype)
    whole = partial(train, config, 2, attention=attention, dtype=dtype, optimizer="sgd")
    assert longest_sequence(whole, at[640], longest=1024).sequence < 640


def test_a_version_that_saves_nothing_does_not_fit(family):
    """Dense attention, all blocks kept, at what the others answer."""
    config, answers = family("gpt2", layers=2, vocab_size=50, context_length=4096), []
    whole = partial(train, config, 2, optimizer="sgd")
    budget = peak_of(whole, 256)
    recomputed, flash = {"recompute_blocks": True}, {"attention": "flash"}
    for options in (recomputed, flash, recomputed | flash):
        step = partial(train, config, 2, optimizer="sgd", **options)
        answers.append(longest_sequence(step, budget, longest=4096).sequence)
        assert peak_of(step, answers[-1]) <= budget < peak_of(whole, answers[-1])
    assert 256 < answers[0] and 256 < answers[1] < answers[2]


@pytest.mark.parametrize(("vocab_size", "name", "operation"), [
    (50_000, "loss", "_log_softmax_backward_data"), (3000, "softmax", "_softmax_backward_data in blocks.0.attention")])
def test_the_closed_form_is_found_again(family, vocab_size, name, operation):
    """Fitted at three lengths, a moment is that of `training_step_moments`, to the last coefficient."""
    config = family("gpt2", layers=1, vocab_size=vocab_size, context_length=100_000)
    def closed(s):
        return memory.training_step_moments(config, 2, s, optimizer="sgd")[name]

    found = longest_sequence(partial(train, config, 2, optimizer="sgd"), 2**29, multiple=1)
    assert found.ledger == closed(found.sequence) == training_step_bytes(config, 2, found.sequence, optimizer="sgd")
    form = Quadratic.through(lambda s: closed(s).total)
    assert form == found.polynomial and form.largest(2**29) == found.sequence and operation in found.moment
    text = str(found)
    assert f"{found.sequence:,} tokens: 51" in text and "limited by the budget" in text and "·s²" in text


def test_more_rows_are_shorter_ones(family):
    config = family("gpt2", layers=1, context_length=4096, vocab_size=50)
    lengths = [longest_sequence(partial(train, config, rows, optimizer="sgd"), 10**8, multiple=1).sequence
               for rows in (1, 2, 4)]
    assert lengths == sorted(lengths, reverse=True) and 1.8 < lengths[0] ** 2 / lengths[1] ** 2 < 2.2


def around(body):
    """A model; its loss is that of guessing the tokens themselves."""
    return nn.Sequential(nn.Embedding(300, 64), body, nn.Linear(64, 300))


def encoder():
    """Torch's own, in training mode."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return around(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class Recurrent(nn.LSTM):
    """Its outputs alone."""
    def forward(self, x):
        return super().forward(x)[0]


class Cells(nn.LSTMCell):
    """The same, cell by cell: so many operations as tokens."""
    def forward(self, x):
        states = [None]
        for each in x.unbind(1):
            states.append(super().forward(each, states[-1]))
        return torch.stack([h for h, _ in states[1:]], 1)


def two_steps(sequence, model, optimizer):
    """Of which the first makes the optimizer's states."""
    for _ in range(2):
        tokens = torch.zeros(3, sequence, dtype=torch.int64)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "square"), [
    (encoder, True), (lambda: around(Recurrent(64, 64, 2, batch_first=True)), False)], ids=["encoder", "recurrent"])
def test_models_that_others_wrote(kind, square):
    def step(sequence):
        model = kind()
        two_steps(sequence, model, torch.optim.AdamW(model.parameters()))

    found = longest_sequence(step, 2 * 10**8)
    assert peak_of(step, found.sequence) == found.peak <= 2 * 10**8 < peak_of(step, found.sequence + 64)
    assert found.polynomial(found.sequence) == found.peak and len(found.dry_runs) == 5
    assert (found.polynomial.a > 0) == square


def test_a_model_that_exists_already():
    """It is given as an argument; the search trains a fake copy of it."""
    model = encoder()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model[2].weight.clone()
    found = longest_sequence(two_steps, 10**8, model, optimizer)
    assert found.peak == peak_of(two_steps, found.sequence, model, optimizer) <= 10**8
    assert peak_of(two_steps, found.sequence + 64, model, optimizer) > 10**8
    assert torch.equal(model[2].weight, before) and not optimizer.state


def test_a_loop_over_tokens():
    def step(sequence):
        model = around(Cells(64, 64))
        two_steps(sequence, model, torch.optim.SGD(model.parameters(), lr=0.1))

    found = longest_sequence(step, peak_of(step, 20), multiple=2)
    assert found.sequence == 20 and found.peak == peak_of(step, 20) and found.polynomial.a == 0


def takes(nbytes):
    """A step that takes so many bytes at its highest: for the search alone, a function of the length."""
    return lambda sequence: torch.empty(int(nbytes(sequence)), dtype=torch.uint8)


def padded(sequence):
    """To 512 tokens at the least, and to multiples of 128."""
    return 1000 * max(512, 128 * math.ceil(sequence / 128))


@pytest.mark.parametrize(("nbytes", "budget", "expected"), [
    (padded, 512_000, 512), (padded, 900_000, 896), (padded, 512_001, 512), (padded, 10_000_000, 9984),
    (lambda s: s**3, 10**9, 1000), (lambda s: s**3, 10**9 - 1, 999), (lambda s: s**1.5, 10**6, 10_000),
    (lambda s: s if s <= 1234 else 1000 * s, 10**5, 1234), (lambda s: 1000 * min(s, 100) + s, 150_000, 50_000),
    (lambda s: 8 * s + s // 8, 10**6, 123_077), (lambda s: s * (s + 1) // 2, 10**6, 1413), (lambda s: 7 * s, 7, 1)])
def test_bytes_that_are_no_polynomial(nbytes, budget, expected):
    """A fit may be wrong; the answer may not. And every third dry run halves what is left."""
    found = longest_sequence(takes(nbytes), budget, multiple=1)
    assert (found.sequence, found.peak) == (expected, int(nbytes(expected)))
    assert len(found.dry_runs) <= 3 * 17
    assert found.polynomial is None or found.polynomial(expected) == found.peak


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 6, 7, 8, 9, 30])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 8, 9, 29, 30, 31])
def test_small_ranges(longest, most):
    found = longest_sequence(takes(lambda s: 10 * s), 10 * most, longest=longest, multiple=1)
    assert (found.sequence, found.limit) == ((most, "budget") if most < longest else (longest, "longest"))


def test_the_longest_is_a_multiple():
    found = longest_sequence(takes(lambda s: s), 10**6, longest=1000)
    assert (found.sequence, found.limit) == (960, "longest") and max(found.dry_runs) == 960, "of 64, unless it is said"
    assert found.polynomial == Quadratic(b=1)


def test_bytes_that_do_not_grow():
    with pytest.raises(ValueError, match="step takes 5 bytes at each of 4, 6, 8, 16, .* tokens: does it use its"):
        longest_sequence(takes(lambda s: 5), 10, multiple=1)
    found = longest_sequence(takes(lambda s: 5), 10, longest=10_000, multiple=1)
    assert (found.sequence, found.limit) == (10_000, "longest")


@pytest.mark.parametrize("drawn", [False, True])
def test_a_bar_writes_nothing_or_stays(monkeypatch, capsys, drawn):
    """A notebook would show an empty box for a bar that clears itself."""
    when = {"delay": 1e-9 if drawn else 1000, "mininterval": 0}
    monkeypatch.setattr(longest, "tqdm", lambda **options: tqdm(**options | when))
    longest_sequence(lambda s: torch.ones(100 * s), 4 * 100 * 1000)
    shown = capsys.readouterr().err
    assert shown.endswith("\n") and shown.rpartition("\r")[2].startswith("dry runs: 5it") if drawn else shown == ""


def test_a_budget_too_small_names_the_smallest(family):
    step = partial(train, family("gpt2", layers=1), 2, optimizer="sgd")
    least, one = peak_of(step, 64), peak_of(step, 1)
    with pytest.raises(ValueError, match=f"a step of 64 tokens takes {least:,} bytes, .*, the smallest feasible"):
        longest_sequence(step, least - 1, longest=1024)
    assert longest_sequence(step, least, longest=1024).sequence == 64
    assert longest_sequence(step, one, longest=1024, multiple=1).sequence >= 1
    with pytest.raises(ValueError, match=f"a step of 1 tokens takes {one:,} bytes"):
        longest_sequence(step, one - 1, longest=1024, multiple=1)


@pytest.mark.parametrize(("options", "message"), [
    *(({"budget": budget}, "budget=.*: expected bytes, a number above 0")
      for budget in (0, -1, math.nan, math.inf, 10**400, None, "8 GiB", True)),
    ({"multiple": 0}, "multiple=0: expected an integer of at least 1"),
    ({"multiple": 2048, "longest": 1024}, "multiple=2048: longer than longest=1024; give a smaller one"),
    ({"multiple": 1.5}, "multiple=1.5: expected an integer"), ({"multiple": True}, "multiple=True: expected an int"),
    ({"longest": 0}, "longest=0: expected an integer of at least 1"), ({"longest": "64"}, "longest='64': expected")])
def test_options_that_are_not_known(options, message):
    with pytest.raises(ValueError, match=message):
        longest_sequence(takes(lambda s: s), **{"budget": 10**9} | options)


def test_a_name_is_no_step():
    with pytest.raises(TypeError, match="step='gpt2': expected a function of the sequence length"):
        longest_sequence("gpt2", 2**30)


def test_a_length_that_the_model_has_not(family):
    """The model's own error, with what to do about it."""
    with pytest.raises(ValueError) as caught:
        longest_sequence(partial(train, family("gpt2", layers=1, context_length=512), 1, optimizer="sgd"), 10**9)
    assert "give longest=" in caught.value.__notes__[0]


def test_published_models(family):
    """GPT-2, cut to two layers: with the whole vocabulary the loss is highest."""
    config = GPTConfig.named("gpt2", layers=2)
    found = longest_sequence(partial(train, config, 4, optimizer="sgd"), 2 * 2**30, longest=1024, multiple=1)
    assert found.peak == training_step_bytes(config, 4, found.sequence, optimizer="sgd").total <= 2 * 2**30
    assert training_step_bytes(config, 4, found.sequence + 1, optimizer="sgd").total > 2 * 2**30


def test_recomputation_by_the_callers_own_means(family):
    """A step may do what it wants; here it wraps its own blocks."""
    config = replace(family("llama", layers=2), context_length=2048)
    def step(sequence):
        model = GPT(config)
        with recompute(model.blocks):
            model(torch.zeros(2, sequence, dtype=torch.int64)).sum().backward()

    found = longest_sequence(step, 5 * 10**7, longest=2048)
    assert peak_of(step, found.sequence) == found.peak <= 5 * 10**7 < peak_of(step, found.sequence + 64)


def test_a_moment_that_is_the_highest_only_later_needs_no_more_dry_runs():
    """Up to 600 tokens a linear one is, then a quadratic one."""
    def step(sequence):
        torch.empty(1200 * sequence)
        torch.empty(2, sequence, sequence)

    found = longest_sequence(step, 2 * 768 * 768 * 4)
    assert [*found.dry_runs] == [256, 384, 512, 768, 832]
