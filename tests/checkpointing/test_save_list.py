"""A save-list: its operations do not run again, its outputs are the bytes that are kept."""

import pytest
import torch
from operations_kit import Operations
from torch.nn import functional as F

from refimpl import memory
from refimpl.checkpointing import checkpoint
from refimpl.checkpointing.save_list import operations

aten = torch.ops.aten


def fn(x, w):
    return F.dropout(((x @ w).tanh() @ w).relu(), 0.5).sin()


def run(pair, how, **options):
    """(gradients, bytes kept besides the output, the operations of the backward)."""
    torch.manual_seed(0)
    with memory.track(*pair) as t:
        y = how(fn, *pair, **options)
    with Operations() as backward:
        gradients = torch.autograd.grad(y.square().sum(), pair)
    return gradients, t.now.total - t.start.total - y.nbytes, [op.overloadpacket for op in backward.ran]


@pytest.mark.parametrize(("save", "outputs"), [
    ([], 0), ([aten.mm], 2), ([aten.mm.default, aten.tanh], 3), ([aten.relu], 1), ([aten.mm, aten.mul], 3)])
def test_kept_outputs_are_the_bytes_and_do_not_run_again(pair, save, outputs):
    expected, _, plain = run(pair, lambda fn, *args: fn(*args))
    gradients, kept, names = run(pair, checkpoint, save=save)
    assert all(map(torch.equal, gradients, expected)) and kept == outputs * 16 * 32 * 4 + 5056
    for op in (aten.mm, aten.tanh, aten.relu):
        wanted = op in save or op.default in save
        assert names.count(op) - plain.count(op) == (0 if wanted else 2 if op is aten.mm else 1), op


def test_an_output_changed_in_place_in_the_region_is_computed_again(pair):
    def fn(x, w):
        return (x @ w).mul_(2).tanh() @ w
    with memory.track(*pair) as t:
        y = checkpoint(fn, *pair, save=[aten.mm])
    assert t.now.total - t.start.total == y.nbytes, "the second product is y; the first was not kept"
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), pair), torch.autograd.grad(fn(*pair).sum(), pair)))


def test_an_output_changed_in_place_after_the_region_is_an_error(pair):
    y = checkpoint(lambda x, w: x.sin() @ w, *pair, save=[aten.mm], early_stop=False)
    with pytest.raises(RuntimeError, match="mm.default that was kept.*changed in place"):
        y.add_(1).sum().backward()


def test_a_second_backward_computes_all_of_it(pair):
    y = checkpoint(fn, *pair, save=[aten.mm]).sum()
    assert all(map(torch.equal, torch.autograd.grad(y, pair, retain_graph=True), torch.autograd.grad(y, pair)))


def test_random_operations_that_are_kept_leave_the_others_their_numbers(pair):
    def fn(x, w):
        return F.dropout(torch.rand_like(x) * x, 0.5) @ w
    def gradients(how, **options):
        torch.manual_seed(0)
        return torch.autograd.grad(how(fn, *pair, **options).sum(), pair)
    assert all(map(torch.equal, gradients(checkpoint, save=[aten.rand_like]), gradients(lambda fn, *args: fn(*args))))


def test_another_operation_the_second_time_is_an_error(pair):
    runs = [lambda x, w: (x @ w).tanh().sin(), lambda x, w: (x @ w.T).relu().tanh().tanh().sin()]
    y = checkpoint(lambda *args: runs.pop(0)(*args), *pair, save=[aten.mm, aten.tanh, aten.relu])
    with pytest.raises(RuntimeError, match="reached aten.relu.default where the forward ran aten.tanh.default, call 1"):
        y.sum().backward()


@pytest.mark.parametrize(("save", "kind", "message"), [
    (aten.mm, TypeError, "expected a list of operations"), (["mm"], TypeError, "save has 'mm': expected an operation"),
    ([torch.mm], TypeError, "expected an operation, e.g. torch.ops.aten.mm"),
    ([aten.view], ValueError, "aten.view, which writes into an argument or returns a view"),
    ([aten.add_.Tensor], ValueError, "take it off the list")])
def test_what_has_no_output_to_keep_is_refused(pair, save, kind, message):
    with pytest.raises(kind, match=message):
        checkpoint(fn, *pair, save=save)


def test_a_packet_is_its_overloads_that_return_something_new():
    assert operations([aten.mm]) >= {aten.mm.default} and aten.mm.out not in operations([aten.mm])


def test_a_kept_output_goes_where_the_recomputation_needs_it_no_more():
    n = 256
    def scaled(x, w):
        """exp's result is saved, the product of x and w is not, and there is a temporary of four times its bytes."""
        sums = (x @ w).sum(1, keepdim=True)
        with torch.no_grad():
            offset = torch.ones(4 * n, n).sum()
        return (sums + offset).exp()
    x, w = (torch.randn(n, n).div_(n).requires_grad_() for _ in range(2))
    with memory.track(x, w) as t:
        loss = checkpoint(scaled, x, w, save=[aten.mm]).sum()
        loss.backward()
    extra = t.peak_moment("backward").ledger.total - t.start.total - 4 * 4 * n * n  # beside the temporary
    assert 0 <= extra < 4 * n * n
