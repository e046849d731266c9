"""Which attention when: closed forms that are what is measured, and choices that follow from them."""

import math

import pytest
import torch

from benchmarks import which as bench
from refimpl import catalog
from refimpl.attention import which
from refimpl.attention.which import BANDS, METHODS, NEVER, closed, exponent, recommend, table
from refimpl.config import GPTConfig

FOUND = {"standard": 1.0, "Longformer": 0.3, "BigBird": 0.6, "Linformer": 0.9, "linear": 0.7}


@pytest.fixture(scope="module")
def read():
    rows = list(bench.rows((256, 512)))
    return rows, bench.readings(rows)


def test_closed_forms_are_what_is_measured(read):
    for each in read[0]:
        assert each["ratio"] == 1 or each["method"] == "linear" and each["unit"] == "FLOPs", each
    shape = (1, bench.HEADS, 512, bench.HEAD_DIM)
    assert {name: found[0] for name, found in closed(shape).items()} == {
        name: found[512][0] for name, found in read[1].items()}


def test_closed_forms_of_lengths_that_no_tile_divides():
    for T in (300, 1100):  # memory-efficient attention takes 1,024 queries and √T keys at a time
        for each in bench.rows((T,)):
            assert each["ratio"] == 1 or each["method"] == "linear" and each["unit"] == "FLOPs", each


def test_exponents_tell_a_square_from_a_line(read):
    for name, by in read[1].items():
        nbytes, flops = (exponent(by[256][i], by[512][i], 2) for i in (0, 1))
        assert (nbytes > 1.8) == (name == "standard"), (name, nbytes)
    shapes = [(1, 2, T, 64) for T in (2**15, 2**17)]
    for name in METHODS:
        few, many = (closed(shape, torch.bfloat16, kernels=True)[name] for shape in shapes)
        square = name in ("standard", "memory-efficient", "flash")
        assert (exponent(few[1], many[1], 4) > 1.9) == square, name
        assert (exponent(few[0], many[0], 4) > 1.9) == (name == "standard"), name


def test_the_table_says_what_was_read_and_what_does_not_exist(read):
    text = table(read[1], FOUND)
    assert all(name in text for name in (*METHODS, *NEVER))
    (few, flops), (many, more) = (read[1]["standard"][T] for T in (256, 512))
    rows = [line.split() for line in text.splitlines() if line.startswith("standard ")]
    assert rows[0] == ["standard", f"{few / 2**20:,.2f}", f"{many / 2**20:,.2f}", f"T^{math.log2(many / few):.2f}"]
    assert rows[1] == ["standard", f"{flops / 1e9:,.2f}", f"{more / 1e9:,.2f}", f"T^{math.log2(more / flops):.2f}"]
    assert "90%, not causal" in text and "not read" in table(read[1], {})
    assert max(map(len, text.splitlines())) <= 88


def test_a_choice_fits_and_finds_and_is_the_fastest_of_those():
    config, gpu = GPTConfig.named("gpt2"), catalog.hardware("a100-80")
    for tokens in (512, 4096, 32768, 262144):
        found = recommend(config, gpu, tokens, FOUND)
        nbytes, seconds, why = found.considered[found.method]
        assert not why and nbytes <= gpu.memory_bytes
        assert all(seconds <= other for _, other, why in found.considered.values() if not why)
        assert found.considered["Linformer"][2] == "is not causal"
        assert found.considered["Longformer"][2] == "finds 30%"
    assert found.considered["standard"][2].endswith("GiB")  # 262,144² numbers


def test_what_is_asked_of_it_changes_the_choice():
    config, gpu = GPTConfig.named("gpt2"), catalog.hardware("a100-80")
    assert recommend(config, gpu, 262144, FOUND).method == "flash"
    assert recommend(config, gpu, 262144, FOUND, least=0.7).method == "linear"
    assert recommend(config, gpu, 2**22, FOUND).method is None  # nothing fits
    assert recommend(config, gpu, 512, FOUND).method == "flash"


def test_what_is_not_exact_has_to_pay_for_what_it_loses():
    config, gpu, all_found = GPTConfig.named("gpt2"), catalog.hardware("a100-80"), dict.fromkeys(FOUND, 1.0)
    chosen = {tokens: recommend(config, gpu, tokens, all_found) for tokens in (1024, 3072, 4096, 65536)}
    assert [found.method for found in chosen.values()] == ["flash", "flash", "linear", "linear"]
    for tokens, found in chosen.items():
        exact, other = (found.considered[name][1] for name in ("flash", "linear"))
        assert (exact >= 1.25 * other) == (tokens > 3072)
    assert recommend(config, gpu, 1024, all_found, worth=1.0).method == "linear"
    assert recommend(config, gpu, 4096, all_found, worth=2.0).method == "flash"


def test_a_step_is_its_matrices_and_its_attention():
    config, gpu = GPTConfig.named("gpt2"), catalog.hardware("a100-80")
    short, long = (recommend(config, gpu, tokens, FOUND, utilisation=1.0).considered["flash"][1]
                   for tokens in (1024, 32768))
    matrices = 8 * 124e6 / gpu.bf16_flops  # of a token: all numbers of GPT-2, but its positions, are in matrices
    assert matrices * 1024 < short < 1.3 * matrices * 1024
    pairs = 4.5 * 12 * 2 * 768 * 32768**2 / gpu.bf16_flops  # twice 2·D FLOPs for each head and pair, half of all seen
    assert matrices * 32768 + pairs < long < 1.01 * (matrices * 32768 + pairs) + 0.01 * pairs


def test_beside_it_stands_what_the_articles_say():
    config, gpu = GPTConfig.named("gpt2"), catalog.hardware("a100-80")
    said = [recommend(config, gpu, tokens, FOUND).articles for tokens in (999, 1000, 9999, 10_000, 100_000)]
    assert said == ["FlashAttention-2", *["FlashAttention-2, in chunks"] * 2, "Longformer or BigBird",
                    "Linformer, or sparse attention of one's own"]
    assert list(BANDS)[-1] == math.inf
    with pytest.raises(ValueError, match="tokens=0: expected an int of at least 1"):
        recommend(config, gpu, 0, FOUND)


def test_a_method_that_materialises_all_pairs_would_be_seen(monkeypatch):
    flash = METHODS["flash"]
    monkeypatch.setitem(which.METHODS, "flash", flash._replace(call=METHODS["standard"].call))
    rows = [each for each in bench.rows((256,)) if each["method"] == "flash"]
    assert all(each["ratio"] > 1.3 for each in rows)
