"""A tracked program takes what it takes untracked: the allocator alone reads it, in a run of its own."""

import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from users_kit import Named, function_of

from refimpl import memory
from refimpl.memory.tracking import storages


def the_same_gradient_for_two(h, weights, x):
    g = x @ weights[1]
    ((h[None] + g[None]).sum() + h.square().sum() + g.square().sum()).backward()


def gradients_that_somebody_keeps(h, weights, x):
    kept, views = [], [h.view_as(h) for _ in range(3)]
    for view in views:
        view.register_hook(kept.append)
    sum((view @ weights[1]).square().sum() for view in views).backward()


def a_gradient_that_stays(h, weights, x):
    h.retain_grad()
    sum((h @ w).square().sum() for w in weights).backward()


def gradients_in_another_order_of_dimensions(h, weights, x):
    h = h.t()
    sum((w @ h).square().sum() for w in weights).backward()


def a_graph_used_twice(h, weights, x):
    loss = sum((h @ w).square().sum() for w in weights)
    loss.backward(retain_graph=True)
    loss.backward()


def a_graph_of_gradients(h, weights, x):
    (gradient,) = torch.autograd.grad(sum((h @ w).square().sum() for w in weights), h, create_graph=True)
    gradient.square().sum().backward()


def recomputed(h, weights, x):
    def heads(h):
        return sum((h @ w).square().sum() for w in weights)
    (checkpoint(heads, h, use_reentrant=False) + checkpoint(heads, h, use_reentrant=True)).backward()


Twice = function_of(lambda ctx, x: x * 2, lambda ctx, gradient: (
    torch.zeros_like(gradient).index_add(0, torch.arange(128), gradient) + gradient))


def rows_of_a_table(weights, x):
    rows = torch.randint(64, (512,))
    (weights[0][rows].sum() + torch.nn.functional.embedding(rows, weights[0]).square().sum()).backward()


def beside_a_mode_of_the_users(weights, x):
    with FlopCounterMode(display=False):
        PROGRAMS["a_state_read_by_four_heads"](weights, x)


def of_hidden(function):
    return lambda weights, x: function(x @ weights[0], weights, x)


# Each takes weights (4 of 64 × 64) and an input (128, 64), most of them by way of a hidden state, and leaves gradients.
PROGRAMS = {name: of_hidden(function) for name, function in {
    "a_state_read_by_four_heads": lambda h, weights, x: sum(
        (h @ w[:, :4].contiguous()).square().sum() for w in weights).backward(),
    "the_same_gradient_for_two": the_same_gradient_for_two,
    "gradients_that_somebody_keeps": gradients_that_somebody_keeps, "a_gradient_that_stays": a_gradient_that_stays,
    "gradients_that_are_views": lambda h, weights, x: (h.sum() + h.mean() + h.square().sum() + h[:64].sum()).backward(),
    "gradients_in_another_order_of_dimensions": gradients_in_another_order_of_dimensions,
    "a_graph_used_twice": a_graph_used_twice, "a_graph_of_gradients": a_graph_of_gradients, "recomputed": recomputed,
    "several_roots": lambda h, weights, x: torch.autograd.backward(
        [h @ w for w in weights], [torch.ones(128, 64) for _ in weights]),
    "a_users_own_function": lambda h, weights, x: (Twice.apply(h) + Twice.apply(h).sin()).sum().backward(),
}.items()} | {"rows_of_a_table": rows_of_a_table, "beside_a_mode_of_the_users": beside_a_mode_of_the_users}


def values_and_places(h, name):
    given = {"topk": (8,), "kthvalue": (5,), "sort": ()}.get(name, (1,))
    return getattr(h, name)(*given)[0]


def of_all_elements(h, name):
    return getattr(h, name)()


def along_a_dimension(h, name):
    return getattr(h, name)(1)


def by_index(h, name):
    index = torch.randint(64, (128, 32))
    given = {"gather": (1, index), "index_select": (0, index[0]), "take": (index,)}.get(name, (index, 1))
    return getattr(h, name)(*given)


def beside_other_tensors(h, name):
    if name == "index":
        return h[torch.arange(0, 128, 2)]
    if name == "binary_cross_entropy":
        return torch.nn.functional.binary_cross_entropy(h.sigmoid(), h.detach().sigmoid().requires_grad_())
    return {"masked_select": lambda: h.masked_select(h > 0),
            "clamp": lambda: h.clamp(-h.detach().abs(), torch.ones(64, requires_grad=True)),
            "masked_fill": lambda: h.masked_fill(h > 0, torch.ones((), requires_grad=True))}[name]()


def of_formula(function, name):
    return lambda weights, x: function((x @ weights[0]).tanh(), name).sum().backward()


FORMULAS = {
    values_and_places: "sort topk max min median nanmedian mode kthvalue cummax cummin",
    of_all_elements: "max min median prod trace", along_a_dimension: "cumprod prod",
    by_index: "gather index_select take_along_dim take",
    beside_other_tensors: "index masked_select clamp masked_fill binary_cross_entropy"}
ALL = PROGRAMS | {f"{function.__name__} {name}": of_formula(function, name)
                  for function, names in FORMULAS.items() for name in names.split()}


def prepare():
    """A new run: (weights, x), all that they need drawn anew."""
    torch.manual_seed(0)
    return [torch.randn(64, 64, requires_grad=True) for _ in range(4)], torch.randn(128, 64)


def alone(function):
    """(Peak of the allocator, net, gradients) of a run that nothing else watches."""
    given = prepare()
    with memory.measure("cpu") as m:
        function(*given)
    return m.peak, m.net, [w.grad for w in given[0]]


def watched(function):
    """The same of a run that is tracked, and the trace."""
    given = prepare()
    with memory.track(*given) as t, memory.measure("cpu") as m:
        function(*given)
    return m.peak, m.net, [w.grad for w in given[0]], t


@pytest.mark.parametrize("name", ALL)
def test_it_takes_what_it_takes_untracked(name):
    alone(ALL[name])  # the first use of some parts of PyTorch keeps something for ever
    peak, net, gradients = alone(ALL[name])
    tracked_peak, tracked_net, tracked_gradients, t = watched(ALL[name])
    assert (tracked_peak, tracked_net) == (peak, net)
    for ours, theirs in zip(tracked_gradients, gradients, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert t.now.total - t.start.total == net


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "beside_a_mode_of_the_users"])
def test_the_tracker_reads_it_and_so_does_a_dry_run(name):
    alone(PROGRAMS[name])
    peak, _, _ = alone(PROGRAMS[name])
    given = prepare()
    with memory.track(*given) as t:
        PROGRAMS[name](*given)
    assert t.peak.total - t.start.total == pytest.approx(peak, rel=1e-3)
    dry = memory.dry_run(PROGRAMS[name], *prepare())
    assert dry.peak == t.peak and dry.now == t.now


@pytest.mark.parametrize("name", ["a_state_read_by_four_heads", "values_and_places sort", "by_index gather"])
def test_a_tracker_that_is_in_the_way_is_seen(name, monkeypatch):
    peak, _, _ = alone(ALL[name])
    monkeypatch.setattr(storages, "sum_of", lambda args: torch.ops.aten.add.Tensor)
    monkeypatch.setattr("refimpl.memory.tracking.in_place._ASKING", frozenset())
    assert watched(ALL[name])[0] > 1.05 * peak


def test_beside_a_mode_of_the_users_a_dry_run_reads_what_the_tracker_reads():
    """Autograd computes out of place there."""
    def step(x):
        with FlopCounterMode(display=False):
            x.gather(0, torch.tensor([3])).backward()

    x = torch.ones(1000, requires_grad=True)
    dry = memory.dry_run(step, x)
    with memory.track(x) as t:
        step(x)
    assert dry.peak == t.peak and t.peak.total - t.start.total > 2 * x.nbytes


def test_gradients_are_added_up_in_place_in_every_tracked_run():
    function = PROGRAMS["a_state_read_by_four_heads"]
    alone(function)
    peak, _, _ = alone(function)
    assert [watched(function)[0] for _ in range(2)] == [peak] * 2


def test_the_figures_of_a_hidden_state_read_by_four_linears():
    body, heads = torch.nn.Linear(8, 1024), torch.nn.ModuleList(torch.nn.Linear(1024, 8) for _ in range(4))
    x = torch.randn(8192, 8)
    def step():
        h = body(x)
        sum(head(h).square().sum() for head in heads).backward()
        body.zero_grad()
        heads.zero_grad()
    step()
    with memory.measure("cpu") as m:
        step()
    with memory.track(body, heads, x) as t:
        step()
    assert t.peak.total - t.start.total == pytest.approx(m.peak, rel=1e-4)
    assert m.peak < 105e6  # 134 MB if the gradients of h are added up out of place


def test_a_function_of_the_users_may_set_any_attribute():
    body, x = torch.nn.Linear(8, 8, bias=False), torch.randn(2, 8)
    with memory.track(body, x) as t:
        Named.apply(body(x)).square().sum().backward()
    assert t.now["gradients"] == body.weight.nbytes


AFTER_AN_ERROR = """
import torch
from refimpl import memory
from refimpl.checkpointing import recompute

def peak():
    x, heads = torch.ones(64, 64, requires_grad=True), [torch.ones(64, 64, requires_grad=True) for _ in range(4)]
    with memory.track(x, *heads) as t:
        h = x * 2
        sum((h @ head).sum() for head in heads).backward()
    return t.peak.total

blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)]
before, net = peak(), torch.nn.Sequential(*blocks)
recompute(net)
try:
    torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2, 4))
except torch._dynamo.exc.Unsupported:
    print(before, peak())
"""


def test_what_dynamo_leaves_behind_after_an_error_changes_no_reading():
    """From then on it runs each frame of Python, where a call holds its arguments once more."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", AFTER_AN_ERROR], capture_output=True, text=True)
    before, after = done.stdout.split()
    assert before == after, done.stderr[-2000:]
