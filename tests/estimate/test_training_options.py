"""Options: each that cannot be is refused with its value and what to give instead."""

import pytest
import torch

from refimpl.estimate import Options, estimate


@pytest.mark.parametrize(("options", "message"), [
    ({"batch": 0}, "batch=0: expected a whole number of at least 1"), ({"batch": 1.5}, r"batch=1\.5: expected a whole"),
    ({"sequence": True}, "sequence=True: expected"), ({"gpus": 0}, "gpus=0: expected a whole number of at least 1"),
    ({"zero": 4}, "zero=4: expected a stage of ZeRO: 0"), ({"zero": True}, "zero=True"),
    ({"precision": "int8"}, "precision='int8': expected one of fp32, bf16, bf16-master, autocast"),
    ({"optimizer": "lion"}, "optimizer='lion': expected one of adamw"),
    ({"attention": "flash"}, "attention='flash': expected one of sdpa, eager"),
    ({"window": -1}, "window=-1: expected a whole number of tokens"),
    ({"global_tokens": 4}, r"global_tokens=4 without a window: give window=N"),
    ({"window": 8, "attention": "eager"}, "window=8 with attention='eager': give one of the two"),
    ({"precision": "bf16-master", "gpus": 2}, "with zero=0: data parallelism updates the parameters themselves"),
    ({"gpu": "h10"}, "unknown hardware 'h10'; close names: a10"),
    ({"sequence": 1025}, "sequence=1025: gpt2 has a context of 1024 tokens; give that many or less")])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        estimate("gpt2", **options)


def test_the_dtype_that_a_model_is_built_in():
    assert Options(precision="bf16").dtype == Options(precision="bf16-master", zero=1).dtype == torch.bfloat16
    assert Options(precision="bf16-master").dtype == Options(precision="autocast", zero=3).dtype == torch.float32
    assert Options().is_plain and not Options(zero=1).is_plain and not Options(gpus=2).is_plain
