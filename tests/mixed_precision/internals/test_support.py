"""What a device can compute in is asked of the device."""

from unittest.mock import Mock

import pytest
import torch

from refimpl import memory
from refimpl.mixed_precision import autocast
from refimpl.mixed_precision.internals import support


@pytest.fixture(autouse=True)
def asked_anew():
    support._refusal.cache_clear()
    yield
    support._refusal.cache_clear()


def test_a_dtype_that_the_device_cannot_compute_in(monkeypatch):
    refusal = RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nmore of it")
    monkeypatch.setattr(torch, "mm", Mock(side_effect=refusal))
    with pytest.raises(ValueError, match=r"cpu cannot compute in torch.float16 here \(.*not implemented for "
                                         r"'Half'\): use torch.bfloat16 or float32$"):
        autocast(torch.float16, "cpu")
    autocast(torch.float16, "cpu", enabled=False)  # computes nothing in it


def test_it_is_asked_once_and_leaves_no_trace(monkeypatch):
    with memory.track() as t:
        autocast(torch.float16, "cpu")
    assert t.peak.total == 0 and not t.ops
    monkeypatch.setattr(torch, "mm", Mock(side_effect=RuntimeError("never asked again")))
    autocast(torch.float16, "cpu")


def test_bfloat16_that_is_only_emulated_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert "emulated" in support._refusal("cuda", torch.bfloat16)


def test_devices():
    assert support.check_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    assert support.check_device("cpu") == "cpu"


def test_arguments_in_the_wrong_order_are_told_the_right_one():
    with pytest.raises(ValueError, match=r"device_type=torch.bfloat16: the dtype comes first.*"
                                         r"autocast\(torch.bfloat16, 'cpu'\)"):
        autocast("cpu", torch.bfloat16)
