"""The steps of the forward in Gluon, emulated on the CPU."""

import importlib.util
import math
from pathlib import Path

import attention_kit as kit
import pytest
import torch

from refimpl.attention import gluon_consumer, gluon_forward, reference_attention, triton_hopper


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulated_gluon = load(Path(__file__).with_name("emulated_gluon.py"))
CALLS = [  # (B, H, G, T, S, D), causal, window
    ((2, 4, 2, 40, 300, 40), True, None), ((1, 2, 1, 300, 100, 96), True, None), ((1, 1, 1, 1, 257, 128), False, None),
    ((2, 2, 2, 257, 128, 64), False, None), ((1, 2, 2, 257, 129, 64), False, 20), ((1, 2, 1, 300, 400, 112), True, 100),
    ((1, 1, 1, 200, 3, 64), False, 20), ((3, 2, 1, 129, 129, 16), True, 0), ((1, 3, 1, 700, 700, 128), True, None),
    ((1, 2, 1, 600, 900, 64), True, None), ((1, 1, 1, 900, 900, 64), True, 300), ((1, 1, 1, 900, 900, 64), False, 200)]
MODULES = (triton_hopper, gluon_forward, gluon_consumer)


def assert_as_the_reference(modules, shape, causal, window, seed=0):
    q, k, v, _ = kit.inputs(*shape, requires_grad=False, seed=seed)
    out, lse2 = emulated_gluon.forward(modules, q, k, v, causal=causal, window=window)
    expected, lse = reference_attention(q, k, v, causal=causal, window=window, return_logsumexp=True)
    torch.testing.assert_close((out, lse2 * math.log(2)), (expected, lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "causal", "window"), CALLS, ids=str)
def test_it_is_the_reference(shape, causal, window):
    for seed in range(3):
        assert_as_the_reference(MODULES, shape, causal, window, seed)


def test_tiles_that_a_window_cuts_on_both_sides_and_tiles_between_them():
    assert_as_the_reference(MODULES, (1, 1, 1, 600, 900, 64), False, 200)


def test_a_row_whose_every_score_is_minus_infinity_and_a_nan():
    q, k, v, _ = kit.inputs(1, 1, 1, 200, 200, 64, requires_grad=False)
    q[:, :, 4], k[:], q[:, :, 150, 0] = -math.inf, 1.0, math.nan
    out, _ = emulated_gluon.forward(MODULES, q, k, v, causal=True, window=None)
    assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [4, 150] and out[0, 0, 5:150].isfinite().all()


@pytest.mark.parametrize(("right", "wrong"), [
    ("mbarrier.arrive(v_empty.index(last % STAGES), count=1)", "pass"),  # a buffer that is never given back
    ("mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)", "mbarrier.wait(empty.index(slot), step // STAGES)"),
    ("mbarrier.wait(full.index(slot), step // STAGES & 1)", "pass"),  # read before it is there
    ("mbarrier.wait(q_empty.index(0), turn & 1 ^ 1)", "pass"),  # overwritten while it is read
    ("warpgroup_mma_wait(1, deps=(s_RN,))", "warpgroup_mma_wait(2, deps=(s_RN,))"),
    ("    tma.store_wait(0)\n\n\n", "\n\n"),  # the last output does not leave
    ("range(whole - cut)", "range(whole - cut + 1)"),
    ("acc_RD * gl.convert_layout(shrink_R, gl.SliceLayout(1, acc_layout))[:, None]", "acc_RD"),
    ("row + R - 1 + below - first", "row + below - first"), ("LEFT or RIGHT or TAIL, LEFT)", "LEFT or RIGHT, LEFT)"),
    ("gl.minimum(row + above + 1, S) - first", "gl.minimum(row + R + above + 1, S) - first")], ids=str)
def test_the_emulation_sees_what_is_wrong(right, wrong, tmp_path, monkeypatch):
    module, = (x for x in MODULES if right in Path(x.__file__).read_text())
    source = Path(module.__file__).read_text().replace(right, wrong)
    (tmp_path / "mutant.py").write_text(source.replace("from . ", "from refimpl.attention ").replace(
        "from .", "from refimpl.attention."))
    monkeypatch.setattr(emulated_gluon, "TIMEOUT", 0.3)
    monkeypatch.setattr(emulated_gluon, "PRODUCT_TAKES", 0.001)
    monkeypatch.setattr(emulated_gluon, "LOAD_TAKES", 0.003)
    modules = (*MODULES, load(tmp_path / "mutant.py"))
    with pytest.raises((AssertionError, ValueError)):
        for shape, causal, window in CALLS:
            assert_as_the_reference(modules, shape, causal, window)
