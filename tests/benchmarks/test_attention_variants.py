"""The rows of attention's variants at tiny sizes: bytes near the closed form; a variant that keeps a matrix is seen."""

import torch

from benchmarks import attention_variants
from benchmarks.attention_variants import variant_rows
from refimpl.attention import reference_attention


def test_a_row_of_bytes_and_one_of_seconds_for_each():
    rows = list(variant_rows("cpu", torch.float32, rounds=2, length=256))
    names = ["softcap", "ALiBi", "documents", "prefix LM", "sinks", "v of 128, q and k of 192"]
    assert [row["variant"] for row in rows] == [name for name in names for _ in range(2)]
    for peak, step in zip(rows[::2], rows[1::2], strict=True):
        assert peak["unit"] == "bytes" and 0.99 < peak["ratio"] < 1.25, peak  # a few tiles of 128 × 128, of 8 heads
        assert step["unit"] == "s" and step["value"] > 0 < step["peer_value"] and step["rounds"] == 2


def test_one_that_keeps_a_matrix_is_seen(monkeypatch):
    monkeypatch.setattr(attention_variants.attention, "tiled_attention", reference_attention)
    peaks = [row["ratio"] for row in variant_rows("cpu", torch.float32, rounds=2, length=512) if row["unit"] == "bytes"]
    assert min(peaks) > 1.5
