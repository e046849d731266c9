"""Five programs as people write them: each promised saving is switched on and measured, within 5 % or a bound."""

import sys

import pytest
from explain_kit import Program, held

from refimpl.explain import kinds
from refimpl.explain.arithmetic import arithmetic

PROMISES = {"loop": ("recompute", "logits", "attention", "bf16"), "trainer": ("mlp", "recompute"),
            "accelerated": ("attention", "masks"), "vision": ("recompute", "bf16"), "lora": ("mlp", "logits")}


@pytest.fixture(scope="module", autouse=True)
def main_stays():
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(scope="module")
def program():
    found = {}
    return lambda name: found.setdefault(name, None) or found.update({name: Program(name)}) or found[name]


@pytest.mark.parametrize("name", PROMISES)
def test_promises_are_kept(program, name):
    here = program(name)
    for technique in PROMISES[name]:
        promised, saved = here.promised(technique), here.saved(technique)
        assert here.helps[technique].bound == "" and held(promised, saved), (technique, promised, saved)
        assert not held(promised, 0), "a technique that saves nothing"


def test_micro_batches_and_a_bound(program):
    here = program("loop")
    assert held(here.promised("accumulate"), here.saved("accumulate", "--micro-batches", "2"))
    saved = here.saved("int8")
    assert here.helps["int8"].bound and 0.5 * here.promised("int8") < saved <= here.promised("int8")


def test_what_the_arithmetic_leaves_out_sums_to_the_peak_and_is_what_shapes_say(program):
    L, B, H, T, V = 2, 8, 4, 128, 2048
    found = arithmetic(program("loop").replay)
    rest = dict(found.rest)
    assert found.terms == "16 bytes × 675,328 parameters" and found.expected == 16 * 675328
    assert found.expected + sum(rest.values()) == found.peak
    assert rest[kinds.SCORES] == L * 3 * B * H * T * T * 4, "softmax, dropout's noise and their product"
    assert rest[kinds.LOG_PROBABILITIES] == B * T * V * 4 and rest[kinds.LOSS] == 2 * B * T * V * 4
    assert rest["gradients that are not there at the peak"] == -4 * 675328
    lora = arithmetic(program("lora").replay)
    assert lora.terms == "16 bytes × 12,288 trained parameters + 4 bytes × 1,278,912 frozen ones"
    assert lora.expected + sum(dict(lora.rest).values()) == lora.peak


def test_a_model_that_recomputes_and_whose_hidden_layer_is_as_wide_as_its_vocabulary(program):
    here = program("recomputed")
    assert here.helps["recompute"].why == "every block is recomputed already"
    assert here.helps["attention"].bound and here.saved("attention") <= here.promised("attention")
    assert not any(kind in dict(arithmetic(here.replay).rest) for kind in kinds.OF_LOSS), "the peak is in a block"
    assert here.promised("logits") == 0, "tensors of an MLP are no logits"


@pytest.mark.parametrize("name", ["recomputed", "loop", "vision", "lora"])
def test_what_mixed_precision_saves_is_bounded(program, name):
    here = program(name)
    assert here.helps["autocast"].bound and 0 < here.saved("autocast") <= here.promised("autocast")


def test_a_model_of_images_has_no_sequences(program):
    helps = program("convolutions").helps
    assert [helps[name].why for name in ("chunks", "context")] == ["no model here reads sequences"] * 2
    assert helps["zero1"].why == "there is nothing of optimizer state" and helps["zero3"].saves


def test_gradients_that_are_zeroed_in_place_are_found(program):
    assert program("vision").replay.categories.count("gradients") > 0
    assert "drop" not in program("loop").helps["none"].why and "already" in program("loop").helps["none"].why
    assert "already" not in program("vision").helps["none"].why
