"""What the kernels do not take: a clear error before a launch, or another way."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import attention_kit as kit
import pytest
import torch
import triton

from refimpl.attention import Softcap, flash, flash_attention, gluon_forward, triton_forward, triton_hopper
from refimpl.attention.kernels import operators
from refimpl.attention.kernels.operators import attention_delta
from refimpl.zero.quantized import BlockCodec

pytestmark = kit.in_the_interpreter()


def test_bfloat16_in_the_interpreter_is_refused():
    q, k, v, _ = kit.inputs(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter computes it wrongly.*use float32 or float16 here"):
        flash_attention(q, k, v)


def test_bfloat16_on_a_gpu_in_the_interpreter_is_refused_too():
    """There Triton's interpreter computes on copies in the host's memory."""
    with pytest.raises(ValueError, match="interpreter computes it wrongly"):
        operators.check_interpreter(SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))


@pytest.fixture
def old_gpu(monkeypatch):
    """A T4, as torch tells of it; kernels that are compiled, as on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(triton_forward, "forward_kernel", triton.JITFunction(kit.plain))


def test_a_gpu_that_is_too_old_is_named_and_auto_takes_pytorch_s_operations(old_gpu, monkeypatch):
    t4 = torch.device("cuda")
    assert not flash.kernels_run_on(t4)
    with pytest.raises(RuntimeError, match="Tesla T4 has compute capability 7.5, .* 8.0: tiled_attention"):
        operators.check_interpreter(SimpleNamespace(device=t4, dtype=torch.float16))
    x = SimpleNamespace(device=t4, dtype=torch.float16)
    assert not BlockCodec()._by_triton(x) and BlockCodec(kernel="triton")._by_triton(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert flash.kernels_run_on(t4) and BlockCodec()._by_triton(x)
    operators.check_interpreter(x)


def test_triton_imported_before_the_variable_was_set(monkeypatch):
    monkeypatch.setattr(triton_forward, "forward_kernel", triton.JITFunction(kit.plain))
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 came after Triton was imported.*set it before"):
        flash_attention(*kit.inputs()[:3])


def test_strides_that_32_bits_cannot_hold():
    def wide(stride, heads=1):
        return torch.empty(1, device="meta").as_strided((1, heads, 4, 16), (1, 1, stride, 1))

    flash.check_for_kernels(wide(2**23 - 1), wide(1), wide(1))
    for qkv in ((wide(2**23), wide(1), wide(1)), (wide(1), wide(1), wide(2**23))):
        with pytest.raises(ValueError, match="strides .*8388608.*contiguous"):
            flash.check_for_kernels(*qkv)
    with pytest.raises(ValueError, match="524288 heads of 16: expected less than 8,388,608.*heads to the batch"):
        flash.check_for_kernels(wide(1, 2**19), wide(1), wide(1))


def test_a_gradient_whose_strides_32_bits_cannot_hold_is_laid_out_anew(monkeypatch):
    seen = []
    monkeypatch.setattr(operators, "MAX_STRIDE", 60)
    monkeypatch.setattr(operators, "attention_delta",
                        lambda out, d_out, _: seen.append(d_out.stride()) or attention_delta(out, d_out, None))
    q, k, v, gradient = kit.inputs(B=1, H=4, G=2, T=7, S=7, D=8)
    far = gradient.repeat(1, 1, 1, 8)[..., :8]
    kit.assert_as_reference(flash_attention, partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5), (q, k, v, far))
    assert far.stride()[2] == 64 and seen == [gradient.stride()]


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"cu_seqlens": [0, 10, 40]}, {"score": Softcap(5.0)}, {}],
                         ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "gluon"])
def test_a_call_that_the_named_kernel_cannot_compute_is_refused(kernel, options, monkeypatch):
    given = kit.inputs(1, 2, 1, 40, 40, 16)[:3]
    for module in (triton_hopper, gluon_forward):
        monkeypatch.setattr(module, "suits", lambda *_: options != {})  # these tensors are on a CPU
    with pytest.raises(ValueError, match=f"kernel='{kernel}' with q of shape .1, 2, 40, 16.* kernel='auto' takes"):
        flash_attention(*given, kernel=kernel, **options)
    with pytest.raises(ValueError, match="kernel='triton' for torch.float64 on cpu: .* kernel='auto' takes tiled"):
        flash_attention(*(x.double() for x in given), kernel="triton", **options)


def test_of_two_bad_arguments_the_kernel_is_not_named_first():
    with pytest.raises(ValueError, match="dropout_p"):
        flash_attention(*(x.double() for x in kit.inputs()[:3]), kernel="triton", dropout_p=2.0)


def test_a_triton_that_lacks_gluon(monkeypatch):
    monkeypatch.delitem(sys.modules, gluon_forward.__name__)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    lacks = f"kernel='gluon' with Triton {re.escape(triton.__version__)}, which lacks what .*ModuleNotFoundError: .*"
    with pytest.raises(RuntimeError, match=f"{lacks}gluon.*kernel='auto' needs none"):
        flash_attention(*kit.inputs()[:3], kernel="gluon")
    flash_attention(*kit.inputs()[:3])


@pytest.mark.parametrize("kernel", ["cuda", None, 3])
def test_a_kernel_that_nobody_knows_is_refused(kernel):
    with pytest.raises(ValueError, match=f"kernel={kernel!r}: expected one of 'auto', 'triton', 'hopper', 'gluon'$"):
        flash_attention(*kit.inputs()[:3], kernel=kernel)


def test_a_forward_mode_derivative_is_refused():
    q, k, v, _ = kit.inputs(requires_grad=False)
    with pytest.raises(RuntimeError, match="no forward-mode derivative.*use reference_attention"):
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q,), (q,))
    torch.func.jvp(lambda scale: scale * flash_attention(q, k, v), (q,), (q,))  # of something else
