"""What a trace says about the workspaces of kernels."""

import pickle

import pytest
import torch

from refimpl import memory
from refimpl.memory.tracking.taking import NOT_COUNTED, note_of

TABLE = {  # program -> the operations that its trace names, or None
    "a convolution": (
        lambda x: torch.nn.functional.conv2d(x.reshape(1, 4, 16, 16), torch.ones(4, 4, 3, 3)), "convolution"),
    "a product in bf16": (lambda x: x.bfloat16() @ x.t().bfloat16(), "mm"),
    "a product in fp32": (lambda x: x.float() @ x.t().float(), None),
    "a softmax of what is in order": (lambda x: x.softmax(-1), None),
    "a softmax that puts it in order first": (lambda x: x.t().softmax(-1), "_softmax"),
    "a formula of autograd's that takes more than it returns": (
        lambda x: x.clone().requires_grad_().tanh().prod().backward(), "ProdBackward0"),
    "sums": (lambda x: x + x, None)}


@pytest.mark.parametrize("name", TABLE)
def test_a_trace_names_the_operations(name):
    function, named = TABLE[name]
    x = torch.randn(16, 64)
    with memory.track(x) as t:
        function(x)
    assert len(t.notes) == (named is not None)
    if named:
        assert t.notes[0].startswith(f"{NOT_COUNTED} that kernels take inside {named}; memory.with_workspaces")
        assert t.notes[0] in repr(t) and NOT_COUNTED in t._repr_html_() and NOT_COUNTED in repr(t.on("cpu"))
        assert pickle.loads(pickle.dumps(t)).notes == t.notes and NOT_COUNTED in t.plot()._suptitle.get_text()
    else:
        assert NOT_COUNTED not in repr(t) and t.plot()._suptitle is None


@pytest.mark.parametrize(("operation", "copied"), [
    (lambda x: x.softmax(-1), 1), (lambda x: x.log_softmax(0), 1),
    (lambda x: torch.ops.aten._softmax_backward_data(x, x, -1, x.dtype), 2),
    (lambda x: torch.ops.aten._log_softmax_backward_data(x, x, -1, x.dtype), 2)])
def test_the_allocator_has_the_copies_of_what_is_not_in_order(operation, copied):
    x = torch.randn(256, 256)
    for given, copies in ((x, 0), (x.t(), copied)):
        with memory.measure("cpu") as m:
            operation(given)
        with memory.track(x) as t:
            operation(given)
        assert m.peak == pytest.approx((1 + copies) * x.nbytes, rel=0.1) and len(t.notes) == (copies > 0)


def test_they_are_laid_over_and_the_note_goes():
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with memory.track(x) as t, memory.measure("cpu") as m:
        x @ x
    assert t.notes and not memory.with_workspaces(t, m).notes


def test_a_gpus_allocator_counts_them_in_its_peak():
    assert 'memory.measure("cuda") has them in its peak' in note_of({"convolution"}, "cuda:0")
    assert "memory.measure reads them" in note_of({"convolution"}, "xpu:0")
