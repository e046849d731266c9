"""Five programs as people write them: each promised saving is switched on and measured, within 5 % or a bound."""

import textwrap
from functools import cache, partial

import pytest
import torch
from explain_kit import Program, held, helps_of

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.explain import Script, kinds, run
from refimpl.explain.arithmetic import arithmetic
from refimpl.explain.recorded_timeline import RecordedTimeline
from refimpl.zero import Zero1, Zero2, Zero3

program = cache(Program)
PROMISES = {"loop": ("recompute", "logits", "attention", "bf16"), "trainer": ("mlp", "recompute"),
            "accelerated": ("attention", "masks"), "vision": ("recompute", "bf16"), "lora": ("mlp", "logits")}


@pytest.mark.parametrize("name", PROMISES)
def test_promises_are_kept(name):
    here = program(name)
    for technique in PROMISES[name]:
        promised, saved = here.promised(technique), here.saved(technique)
        assert here.helps[technique].bound == "" and held(promised, saved), (technique, promised, saved)
        assert not held(promised, 0), "a technique that saves nothing"


SHARED_KEYS = """
import outside, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    tokens = torch.randint(256, (2, 128))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_where_heads_share_keys_attention_in_tiles_is_a_bound_that_holds(tmp_path):
    """Copies of keys and values, one for each head that reads them, are not there in tiles; what is there is not known.
    """
    path = tmp_path / "train.py"
    path.write_text(SHARED_KEYS)
    without, tiled = (RecordedTimeline(run(Script(path), 2, switch).recording) for switch in (None, "attention"))
    helps, saved = helps_of(without), without.last_peak - tiled.last_peak
    assert helps["attention"].bound and 0 < saved <= helps["attention"].saves <= 1.3 * saved
    assert helps["accumulate"].saves > 0.2 * without.peak


def test_micro_batches_and_a_bound():
    here = program("loop")
    assert held(here.promised("accumulate"), here.saved("accumulate", "--micro-batches", "2"))
    assert here.helps["int8"].bound and 0.5 * here.promised("int8") < here.saved("int8") <= here.promised("int8")


@pytest.mark.parametrize(("technique", "switch"), [
    ("data", ("--rows", "1")), ("context", ("--tokens", "16")), ("chunks", ("--tokens", "16"))])
def test_an_eighth_of_the_batch_stays_within_its_bound(technique, switch):
    here = program("loop")
    promised, saved = here.promised(technique), here.saved(technique, *switch)
    assert here.helps[technique].bound and 0.95 * promised < saved <= promised, "logits and temporaries are cut, too"


def test_bounds_of_states_count_the_temporaries_of_the_update(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent("""
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            model(torch.randn(8, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """))
    timeline = RecordedTimeline(run(Script(path)).recording)
    for name, engine in (("zero1", Zero1), ("zero2", Zero2), ("zero3", Zero3)):
        promised = helps_of(timeline)[name].saves
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
        engine = engine(model, FakeCommunicator(0, 8), partial(torch.optim.AdamW, foreach=True))
        with memory.track(engine, engine.optimizer) as t:
            for _ in range(2):
                engine.backward(engine(torch.randn(8, 256)).sum())
                engine.step()
        assert 0.5 * promised < timeline.peak - t.peak_moment().ledger.total <= promised, name


def test_what_the_arithmetic_leaves_out_sums_to_the_peak_and_is_what_shapes_say():
    L, B, H, T, V = 2, 8, 4, 128, 2048
    found, lora = arithmetic(program("loop").timeline), arithmetic(program("lora").timeline)
    for each in (found, lora):
        assert each.expected + sum(dict(each.rest).values()) == each.peak
    rest = dict(found.rest)
    assert found.terms == "16 bytes × 675,328 parameters" and found.expected == 16 * 675328
    assert rest[kinds.SCORES] == L * 3 * B * H * T * T * 4, "softmax, dropout's noise and their product"
    assert rest[kinds.LOG_PROBABILITIES] == B * T * V * 4 and rest[kinds.LOSS] == 2 * B * T * V * 4
    assert rest["gradients that are not there at the peak"] == -4 * 675328
    assert lora.terms == "16 bytes × 12,288 trained parameters + 4 bytes × 1,278,912 frozen ones"
    assert lora.expected == 16 * 12288 + 4 * 1278912, "no gradients of what is frozen"


def test_a_model_that_recomputes_and_whose_hidden_layer_is_as_wide_as_its_vocabulary():
    here = program("recomputed")
    assert here.helps["recompute"].why == "every block is recomputed already"
    assert here.helps["attention"].bound and here.saved("attention") <= here.promised("attention")
    assert not any(kind in dict(arithmetic(here.timeline).rest) for kind in kinds.OF_LOSS), "the peak is in a block"
    assert here.promised("logits") == 0, "tensors of an MLP are no logits"


@pytest.mark.parametrize("name", ["recomputed", "loop", "vision", "lora"])
def test_what_mixed_precision_saves_is_bounded(name):
    here = program(name)
    assert here.helps["autocast"].bound and 0 < here.saved("autocast") <= here.promised("autocast")


def test_a_model_of_images_has_no_sequences():
    helps = program("convolutions").helps
    assert [helps[name].why for name in ("chunks", "context")] == ["ResNet has NoneType as its output embedding"] * 2
    assert helps["zero1"].why == "there is nothing of optimizer state" and helps["zero3"].saves


def test_gradients_that_are_zeroed_in_place_are_found():
    assert program("vision").timeline.categories.count("gradients") > 0
    assert "drop" not in program("loop").helps["none"].why and "already" in program("loop").helps["none"].why
    assert "already" not in program("vision").helps["none"].why
