"""Bad input is named before anything is computed, in every stage."""

import math

import pytest
import torch

from refimpl import attention, memory
from refimpl.attention.call.arguments import resolve
from refimpl.attention.call.sequences import Band

NONE = {"causal": False, "window": None, "scale": None, "dropout_p": 0.0, "seed": None, "cu_seqlens": None,
        "cu_seqlens_k": None}
STAGES = [attention.reference_attention, attention.tiled_attention, attention.memory_efficient_attention,
          attention.flash_attention]


def shaped(q=(1, 4, 6, 8), k=(1, 2, 6, 8), v=None, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in (q, k, v or k)]


TENSORS = shaped()
BAD_TENSORS = {
    "list": ([[0.0]], *shaped()[1:], TypeError, "q is a list: expected a tensor"),
    "rank": (*shaped(q=(4, 6, 8)), ValueError, r"q of shape \(4, 6, 8\): expected \(batch, heads"),
    "S=0": (*shaped(k=(1, 2, 0, 8)), ValueError, r"k of shape \(1, 2, 0, 8\) is empty"),
    "T=0": (*shaped(q=(1, 4, 0, 8)), ValueError, "q of shape .* is empty"),
    "ints": (*shaped(dtype=torch.int64), ValueError, "q is torch.int64: expected float16"),
    "complex": (*shaped(dtype=torch.complex64), ValueError, "q is torch.complex64"),
    "dtypes": (*shaped()[:2], torch.zeros(1, 2, 6, 8, dtype=torch.bfloat16), ValueError,
               "several dtypes: q torch.float32, k torch.float32, v torch.bfloat16"),
    "devices": (*shaped()[:2], torch.zeros(1, 2, 6, 8, device="meta"), ValueError, "several devices: q cpu, .* v meta"),
    "k and v": (*shaped(v=(1, 2, 7, 8)), ValueError, r"k of shape \(1, 2, 6, 8\) and v of shape \(1, 2, 7, 8\)"),
    "batch": (*shaped(k=(2, 2, 6, 8)), ValueError, "batch .first. and head_dim .last. must be the same"),
    "head_dim": (*shaped(k=(1, 2, 6, 9)), ValueError, "head_dim .last. must be the same"),
    "groups": (*shaped(k=(1, 3, 6, 8)), ValueError, "4 query heads and 3 key heads: .* divides 4"),
    "more groups than heads": (*shaped(k=(1, 8, 6, 8)), ValueError, "4 query heads and 8 key heads"),
    "head_dim 257": (*shaped((1, 1, 2, 257), (1, 1, 2, 257)), ValueError, "head_dim=257: expected 1 to 256")}
BAD_OPTIONS = [
    ({"causal": torch.ones(6, 6)}, TypeError, "causal is a Tensor: expected True or False"),
    ({"window": -1}, ValueError, "window=-1: expected at least 0"), ({"window": True}, TypeError, "window=True"),
    ({"window": 2.0}, TypeError, "window=2.0: expected None or an int"),
    ({"scale": math.nan}, ValueError, "scale=nan: expected a finite number above 0"),
    ({"scale": 0}, ValueError, "scale=0"), ({"scale": math.inf}, ValueError, "scale=inf"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale is a Tensor"), ({"scale": True}, TypeError, "scale is a bool"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p=1.0: expected a number in \[0, 1\)"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p=-0.1"), ({"dropout_p": math.nan}, ValueError, "dropout_p=nan"),
    ({"dropout_p": None}, TypeError, "dropout_p is a NoneType"),
    ({"seed": -1}, ValueError, "seed=-1: expected an int"), ({"seed": 1.0}, TypeError, "seed is a float"),
    ({"seed": 2**63}, ValueError, "seed=9223372036854775808"),
    ({"seed": torch.zeros(2, dtype=torch.int64)}, ValueError, r"seed of shape \(2,\), torch.int64, on cpu: expected"),
    ({"seed": torch.tensor(1, dtype=torch.int32)}, ValueError, "torch.int32, on cpu"),
    ({"seed": torch.zeros((), dtype=torch.int64, device="meta")}, ValueError, "on meta: .* on cpu"),
    ({"cu_seqlens": 6}, TypeError, "cu_seqlens is a int: expected an int32 tensor or a list"),
    ({"cu_seqlens": [0, 6.0]}, TypeError, "cu_seqlens is a list: expected"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"cu_seqlens of shape \(2,\), torch.int64"),
    ({"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, r"shape \(1, 2\)"),
    ({"cu_seqlens": [1, 6]}, ValueError, r"cu_seqlens=\[1, 6\]: expected to begin with 0 and to end with 6"),
    ({"cu_seqlens": [0, 5]}, ValueError, r"cu_seqlens=\[0, 5\]"),
    ({"cu_seqlens": [0]}, ValueError, r"cu_seqlens=\[0\]"),
    ({"cu_seqlens": [0, 4, 3, 6]}, ValueError, r"cu_seqlens=\[0, 4, 3, 6\] decreases"),
    ({"cu_seqlens": [0, 1, 2, 3, 4, 5, 6, 5, 5]}, ValueError, r"\[0, 1, 2, 3, 4, 5, …, 5\]"),
    ({"cu_seqlens": [0, 6], "cu_seqlens_k": [0, 2, 6]}, ValueError, "queries in 1 sequences and keys in 2"),
    ({"cu_seqlens_k": [0, 6]}, ValueError, "queries in 1 sequences and keys in 1: expected as many of both; cu_")]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit(case, stage):
    q, k, v, error, message = BAD_TENSORS[case]
    with pytest.raises(error, match=message):
        stage(q, k, v)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=lambda x: str(x)[:40])
def test_options_that_make_no_sense(options, error, message, stage):
    with memory.track() as t, pytest.raises(error, match=message):
        stage(*TENSORS, **options)
    assert not t.ops  # nothing ran before the error


@pytest.mark.parametrize(("name", "size"), [("query_tile", 0), ("key_tile", -1), ("key_tile", 2.0), (
    "query_tile", True), ("query_chunk", 0), ("key_chunk", -1), ("key_chunk", 2.0)])
def test_sizes_that_make_no_sense(name, size):
    stage = attention.tiled_attention if "tile" in name else attention.memory_efficient_attention
    with pytest.raises(ValueError, match=f"{name}={size!r}: expected an int of at least 1"):
        stage(*TENSORS, **{name: size})


def test_packing_needs_a_batch_of_one():
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2: expected sequences packed"):
        resolve(*shaped((2, 4, 6, 8), (2, 2, 6, 8)), **NONE | {"cu_seqlens": [0, 6]})


def test_what_a_call_becomes():
    call = resolve(*shaped(k=(1, 2, 9, 8)), **NONE | {"causal": True, "window": 3})
    assert call.scale == 8**-0.5 and call.seed is None and call.sequences == (((0, 6), (0, 9), Band(6, 9, 3, 0)),)
    packed = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    call = resolve(*shaped(k=(1, 2, 9, 8)), **NONE | {"cu_seqlens": packed, "cu_seqlens_k": [0, 4, 5, 9]})
    assert call.sequences == (((0, 2), (0, 4), Band(2, 4)), ((2, 2), (4, 5), Band(0, 1)), ((2, 6), (5, 9), Band(4, 4)))


def test_the_seed_comes_from_torchs_generator_unless_given():
    def seed(**options):
        return resolve(*TENSORS, **NONE | {"dropout_p": 0.1} | options).seed

    torch.manual_seed(3)
    first, second = seed(), seed()
    torch.manual_seed(3)
    assert first == seed() and first != second
    state = torch.get_rng_state()
    assert seed(seed=5) == 5 and seed(dropout_p=0.0) is None
    with pytest.raises(ValueError, match="cu_seqlens"):
        seed(cu_seqlens=[0, 5])
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn


@pytest.mark.parametrize("D", [1, 16, 40, 59, 96, 111, 256])
def test_head_dims_that_are_taken(D):
    assert resolve(*shaped((1, 2, 3, D), (1, 1, 3, D)), **NONE).scale == D**-0.5
