"""The kernels: each policy, the table of CUDA too. On a CPU its region is told that CPU tensors are its own."""

from contextlib import contextmanager

import pytest
import torch
from operations_kit import Operations
from precision_kit import Dtypes
from torch import nn
from torch.nn import functional as F

from refimpl.mixed_precision import autocast
from refimpl.mixed_precision.internals import casting_kernels as kernels
from refimpl.mixed_precision.internals import lists
from refimpl.mixed_precision.internals.autocast_regions import AutocastRegion, set_stack, state

x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@contextmanager
def cuda_table(dtype=torch.float16):
    """A region in which CPU tensors are treated as CUDA's are."""
    kernels.register("cuda")
    region, before = AutocastRegion(None, "cuda", dtype, {}), state().stack
    region.on = "is_cpu"
    set_stack((*before, region))
    try:
        yield
    finally:
        set_stack(before)


def dtypes_of(*tensors):
    return {tensor.dtype for tensor in tensors}


def test_low():
    with cuda_table():
        assert dtypes_of(x @ x, F.linear(x, x), torch.einsum("ij,jk->ik", x, x), torch.mv(x, x[0]),
                         torch.addr(x, x[0], x[0]), torch.linalg.multi_dot([x, x]),
                         F.conv1d(x[None], x[:, :, None])) == {torch.float16}


def test_fp32():
    h = x.half()
    with cuda_table():
        assert dtypes_of(h.exp(), h.abs().log(), h**2, 2**h, h.rsqrt(), F.softplus(h), F.layer_norm(h, (4,)),
                         F.rms_norm(h, (4,)), F.mse_loss(h, h), torch.cdist(h, h), h.logsumexp(0), F.group_norm(h, 2),
                         F.cosine_similarity(h, h)) == {torch.float32}
        assert h.double().exp().dtype is torch.float64


def test_fp32_result_reads_the_low_tensor_itself():
    h = x.half()
    with cuda_table(), Operations() as operations:
        assert dtypes_of(h.softmax(-1), F.softmax(h, -1), F.log_softmax(h, dim=-1), h.sum(), h.sum(0),
                         h.sum(dim=(0, 1)), h.prod(), h.prod(0), h.cumsum(0), torch.cumprod(h, dim=0), h.norm(),
                         h.norm(3), torch.norm(h, p=2, dim=1), torch.linalg.vector_norm(h),
                         torch.linalg.matrix_norm(h), torch.linalg.norm(h)) == {torch.float32}
        assert h.sum(dtype=torch.float16).dtype is torch.float16  # who asks for a dtype gets it
        assert h.softmax(-1, torch.float64).dtype is torch.float64 is h.double().sum().dtype
        assert torch.ones(2, dtype=torch.int64).sum().dtype is torch.int64
    assert torch.allclose(torch.norm(h, p=2, dim=1, keepdim=True).float(), x.norm(dim=1, keepdim=True), rtol=1e-2)
    assert torch.ops.aten.sum.dim_IntList in operations.ran


def test_fp32_result_of_an_overload_that_takes_no_dtype():
    """norm's overloads without a dtype give way to those with one, which have fewer defaults."""
    h = x.half()
    with cuda_table():
        for call, args in ((torch.ops.aten.norm.Scalar, ()), (torch.ops.aten.norm.Scalar, (3,)),
                           (torch.ops.aten.norm.ScalarOpt_dim, (2, [1])),
                           (torch.ops.aten.norm.ScalarOpt_dim, (2, [1], True))):
            found = call(h, *args)
            assert found.dtype is torch.float32 and torch.allclose(found, call(h.float(), *args))


def test_promote_to_the_widest_and_at_least_the_region_s():
    h, b = x.half(), x.bfloat16()
    with cuda_table():
        assert dtypes_of(torch.addcmul(x, h, h), torch.dot(x[0], h[0]), torch.tensordot(h, x, 1),
                         h.scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), x)) == {torch.float32}
        assert torch.addcmul(h, h, h).dtype is torch.float16
        assert h.index_put((torch.tensor([0]),), x[0]).dtype is torch.float32  # tensors in lists
        assert torch.atan2(b, h).dtype is torch.float32  # neither holds the other
        assert torch.atan2(x.double(), x.double()).dtype is torch.float64


def test_refuse_says_what_to_use():
    with cuda_table(), pytest.raises(RuntimeError, match="binary_cross_entropy.* is not safe in torch.float16: take "
                                                         "binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    assert F.binary_cross_entropy(x.sigmoid(), x.sigmoid()).dtype is torch.float32


def test_our_gpt_under_cuda_s_table(gpt):
    """Softmax, norms and loss in fp32, products low; tests/gpu holds it against torch.autocast("cuda")."""
    model, tokens = gpt
    with Dtypes() as record:
        with cuda_table():
            loss = model(tokens, tokens)
        loss.backward()
    by_name = {}
    for name, _, dtype in record.forward:
        by_name.setdefault(name, set()).add(dtype)
    assert by_name["aten::bmm"] == {"torch.float16"}
    assert by_name["aten::_softmax"] == by_name["aten::_log_softmax"] == {"torch.float32"}
    norm = "aten::native_layer_norm" if model.config.norm == "layernorm" else "aten::rsqrt"
    assert by_name[norm] == {"torch.float32"} and all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_an_operation_of_another_device_s_table_passes_through():
    """einsum is in CUDA's table alone: in a region for the CPU, the products inside it are cast."""
    kernels.register("cuda")
    with autocast(torch.bfloat16, "cpu"):
        assert torch.einsum("ij,jk->ik", x, x).dtype is torch.bfloat16
        assert nn.GRUCell(4, 4)(x, x).dtype is torch.float32 and x.exp().dtype is torch.float32


def test_an_operation_that_this_pytorch_does_not_have_is_passed_over(monkeypatch):
    monkeypatch.setitem(lists.POLICIES, "cpu", {**lists.POLICIES["cpu"], "not_an_operation.int": lists.LOW})
    kernels.register("cpu")
    assert kernels.operation("not_an_operation.int") is None
    kernels._registered.discard("not_an_operation.int")


def test_kernels_rest_outside_of_regions():
    kernels.register("cpu")
    kernels.register("cuda")
    assert (x @ x).dtype is torch.float32 and x.half().exp().dtype is torch.float16
    with torch.autocast("cpu"):  # and torch's own go on as ever
        assert (x @ x).dtype is torch.bfloat16


def test_a_table_is_registered_once_a_process(monkeypatch):
    """A second time would take milliseconds for each region."""
    for device in ("cpu", "cuda"):
        kernels.register(device)
    monkeypatch.setattr(kernels, "kernel", lambda op, policies: pytest.fail(f"{op} is registered again"))
    for device in ("cpu", "cuda"):
        kernels.register(device)
