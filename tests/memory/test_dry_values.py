"""Ordinary training code runs dry with the bytes of the real run; what it reads of tensors is known, or noted."""

import copy
import inspect
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from counting import counting_backend
from torch.utils.checkpoint import checkpoint
from users_kit import closure_of

from refimpl import memory

HERE = Path(__file__).name


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32))


def loss_of(model, dtype=torch.float32):
    return model(torch.randn(4, 32).to(dtype)).square().mean()


def made(optimizer=torch.optim.AdamW, **options):
    model = mlp()
    return model, optimizer(model.parameters(), **options)


def trained(model, optimizer, dtype=torch.float32, steps=2):
    for _ in range(steps):
        loss = loss_of(model, dtype)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def converted(convert, dtype=torch.float32):
    """The optimizer is made before the conversion: the parameters stay the same objects."""
    model, optimizer = made()
    convert(model)
    trained(model, optimizer, dtype)
    assert [*map(id, model.parameters())] == [*map(id, optimizer.param_groups[0]["params"])]


def converted_with_gradients():
    model, optimizer = made()
    loss_of(model).backward()
    model.to(torch.bfloat16)
    optimizer.step()


def logged(read):
    model, optimizer = made(torch.optim.SGD, lr=0.1, momentum=0.9)
    return [read(trained(model, optimizer, steps=1).detach()) for _ in range(3)]


def skipping():
    """Steps that are not finite are left out."""
    model, optimizer = made()
    for _ in range(2):
        loss = loss_of(model)
        if torch.isnan(loss) or torch.isinf(loss):
            continue
        loss.backward()
        bad = [torch.isnan(p.grad).any() | torch.isinf(p.grad).any() for p in model.parameters()]
        if any(bad) or not all(torch.isfinite(p.grad).all() for p in model.parameters()):
            raise FloatingPointError
        if (~torch.isfinite(loss)).any() or torch.isnan(loss).logical_or(torch.isinf(loss)):
            raise FloatingPointError
        optimizer.step()


def scaled():
    """As torch.amp.GradScaler does it, on a CPU."""
    model, optimizer = made(torch.optim.SGD, lr=0.1)
    scale, tracker = torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    for _ in range(2):
        (loss_of(model) * scale).backward()
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in model.parameters()], found, 1 / scale)
        if not found.item():
            optimizer.step()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2000)
        optimizer.zero_grad()


def closed():
    model, optimizer = made(torch.optim.LBFGS, max_iter=2, history_size=2)
    given = torch.randn(64, 32)
    for _ in range(2):
        optimizer.step(closure_of(optimizer, lambda: model(given).square().mean()))


def stochastic_depth():
    """Rates that are read from a tensor decide whether a layer is there."""
    rates = [x.item() for x in torch.linspace(0, 0.5, 4)]
    rates += [rate for part in torch.linspace(0, 0.5, 4).split([1, 3]) for rate in part.tolist()]
    model = torch.nn.Sequential(*(torch.nn.Dropout(rate) if rate else torch.nn.Identity() for rate in rates))
    return model(torch.randn(100)).sum()


def copied():
    """Known values are copied with a module, and count once."""
    model = mlp()
    model.scale = torch.nn.Parameter(1e-6 * torch.ones(64))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.scale.mul_(0.9).add_(model.scale)
    return twin.scale.tolist()[0], model.scale.tolist()[0]


def recomputed():
    """The mask is known, and decides which way is taken."""
    mask = torch.arange(8) < torch.tensor([[4], [8]])
    checkpoint(mlp(), torch.randn(4, 32), use_reentrant=False).sum().backward()
    return bool(mask.all()), bool(mask.any()), mask.sum(1).tolist()


def layer_norm(order, autocast):
    """Rules of PyTorch's that say other than its kernels: strides of gradients, types of statistics."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(4, 8, 16).transpose(0, 1) if order else torch.randn(4, 8, 16)).square().sum().backward()


def shuffled():
    rows = [torch.rand(3, requires_grad=True) for _ in range(10)]
    for batch in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=torch.stack):
        batch.sum().backward()


def losses():
    """Losses that keep the storage of their elements, and formulas of autograd that count as one operation."""
    x, y = torch.rand(50, 10, requires_grad=True), torch.rand(50, 10)
    f = torch.nn.functional
    for loss in (f.mse_loss, f.smooth_l1_loss, f.soft_margin_loss, f.binary_cross_entropy, f.huber_loss, f.l1_loss):
        loss(x, y).backward()
        loss(x, y, reduction="none").sum().backward()
    for function in (torch.prod, torch.max, torch.median, lambda x: x.clamp(y, y + 1), lambda x: x.cumprod(0)):
        function(x).sum().backward()


PROGRAMS = {  # name -> (the program, how many placeholders it is given)
    "model.to(device)": (partial(converted, lambda m: m.to("cpu")), 0),
    "model.cpu()": (partial(converted, torch.nn.Module.cpu), 0),
    "model.double()": (partial(converted, torch.nn.Module.double, torch.float64), 0),
    "model.to(torch.bfloat16)": (partial(converted, lambda m: m.to(torch.bfloat16), torch.bfloat16), 0),
    "model.half()": (partial(converted, torch.nn.Module.half, torch.float16), 0),
    "converted with gradients": (converted_with_gradients, 0),
    "loss.item()": (partial(logged, lambda loss: loss.item()), 1), "float(loss)": (partial(logged, float), 1),
    "int(loss)": (partial(logged, int), 1), "f'{loss}'": (partial(logged, lambda loss: f"{loss}"), 1),
    "f'{loss:.3f}'": (partial(logged, lambda loss: f"{loss:.3f}"), 1), "print(loss)": (partial(logged, repr), 0),
    "loss.tolist()": (partial(logged, lambda loss: torch.stack([loss, loss]).tolist()), 1),
    "if loss.isfinite()": (partial(logged, lambda loss: 1 / bool(loss.isfinite())), 1),
    "steps that are not finite": (skipping, 4),
    "clip_grad_norm_ with checks": (partial(logged, lambda loss: torch.nn.utils.clip_grad_norm_(
        [torch.nn.Parameter(torch.rand(3)).requires_grad_()], 1.0, error_if_nonfinite=True)), 0),
    "a scaled loss": (scaled, 1), "LBFGS": (closed, 2),
    "a learning rate in a tensor": (
        lambda: trained(*made(lr=torch.tensor(0.1), foreach=False, capturable=False)), 0),
    "rates in a tensor": (stochastic_depth, 0), "a module copied": (copied, 0),
    "a mask that is known": (recomputed, 0),
    "layer norm of a transposed tensor": (partial(layer_norm, True, False), 0),
    "layer norm under autocast": (partial(layer_norm, False, True), 0), "losses": (losses, 0),
    "shuffled": (shuffled, 1)}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor", "ignore:To copy construct")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_takes_as_much_as_the_real_run(name):
    program, placeholders = PROGRAMS[name]
    def run():
        program()
    with memory.track() as real:
        run()
    dry = memory.dry_run(run)
    assert dry.peak == real.peak and dry.now == real.now
    assert sum("placeholder" in note for note in dry.notes) == placeholders, dry.notes


@pytest.mark.parametrize("program", [stochastic_depth, recomputed, copied])
def test_known_values_are_those_of_the_real_run(program):
    dry = memory.dry_run(program).result
    assert dry == program() if program is not stochastic_depth else dry.shape == ()
    assert memory.dry_run(lambda: torch.tensor([1, 2, 3])[1:].tolist()).result == [2, 3]


@pytest.mark.parametrize("write", [
    lambda x: x.mul_(torch.rand(3)), lambda x: torch._foreach_mul_([x], [torch.rand(3)]), lambda x: x.uniform_(),
    lambda x: x[1:].copy_(torch.rand(2)), lambda x: setattr(x, "data", x.data.to(torch.bfloat16)),
    lambda x: setattr(x, "data", torch.rand(3)), lambda x: setattr(x, "data", torch.rand(6)[::2])])
def test_what_is_written_over_is_not_known_any_more(write):
    def step():
        x = torch.ones(3)
        write(x)
        return (x * 2).dtype, x.sum().item()
    dry = memory.dry_run(step)
    with memory.track():
        assert step()[0] == dry.result[0]
    assert dry.result[1] == 0.0 and len(dry.notes) == 1


def test_what_a_tensor_has_been_given_by_data_is_where_its_views_are():
    def step():
        x, second = torch.nn.Parameter(torch.zeros(3)), torch.ones(())
        x.data = second.expand(3)
        view = x[1:]
        return view.detach().sum().item(), view.untyped_storage() is second.untyped_storage()
    with memory.track() as real:
        found = step()
    dry = memory.dry_run(step)
    assert found == (2.0, True) and dry.result == (0.0, True) and len(dry.notes) == 1 and dry.peak == real.peak


def test_given_masks_and_counters_are_known():
    mask, step = torch.arange(8) < 5, torch.tensor(3.0)
    def read(mask, step, tokens):
        return mask.sum().item(), mask[2:].tolist(), step.item(), tokens[mask].shape, (tokens * 1.0).sum().item()
    dry = memory.dry_run(read, mask, step, torch.arange(8))
    assert dry.result == (5, [True] * 3 + [False] * 3, 3.0, (5,), 28.0) and not dry.notes
    assert memory.dry_run(lambda x: x.sum().item(), torch.ones(3)).result == 0.0


def test_a_placeholder_is_said_once_with_its_line():
    def step():
        total = 0.0
        for _ in range(3):
            total += torch.rand(3).sum().item()
        return total
    dry = memory.dry_run(step)
    line = inspect.getsourcelines(step)[1] + 3
    note = f"{HERE}:{line}: `torch.rand(3).sum().item()` reads 0.0 in a dry run, a placeholder: tensors have no values"
    assert dry.notes == [note] and dry.result == 0.0
    assert repr(dry).endswith(f"\nnote: {note}") and "note: " in dry._repr_html_()
    again = pickle.loads(pickle.dumps(dry))
    assert again.notes == again.on("cpu").notes == [note]


def test_comparisons_are_answered_for_zeros():
    def step():
        x = torch.rand(3).sum()
        n = torch.randint(9, (3,)).max()
        return bool(x > 1), bool(x <= 1), bool(n >= 9), bool(n == 4), bool(x.isnan()), bool(torch.randn(3).bool().any())
    assert memory.dry_run(step).result == (False, True, False, False, False, False)
    assert memory.dry_run(lambda: (torch.rand([]) < 0.1).item()).result is False  # a random number is 0.5
    assert memory.dry_run(lambda: torch.empty(3, dtype=torch.bool).all().item()).result is True


def test_a_declared_value_is_taken():
    def step():
        if torch.rand(3).sum() > 1:
            return torch.ones(1000)
        return torch.rand(7).split(torch.rand(2).long().tolist())
    line = inspect.getsourcelines(step)[1] + 1
    assert memory.dry_run(step, values={f"{HERE}:{line}": True}).result.shape == (1000,)
    parts = memory.dry_run(step, values={f"{HERE}:{line + 2}": [3, 4]})
    assert [len(part) for part in parts.result] == [3, 4] and len(parts.notes) == 1


def routed(x, mask):
    return x[mask], mask.nonzero(), x.masked_select(mask), torch.where(mask), x.unique(return_inverse=True)


@pytest.mark.parametrize("size", [5, 5 / 8, lambda shape: shape[0] - 3, [5, 5]])
def test_a_declared_size_takes_as_much(size):
    x = torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 5])
    def step(x):
        return [tuple(y.shape) for part in routed(x, x > 3) for y in (part if isinstance(part, tuple) else [part])]
    line = inspect.getsourcelines(routed)[1] + 1
    with memory.track(x) as real:
        expected = step(x)
    dry = memory.dry_run(step, x, sizes={f"memory/{HERE}:{line}": size})
    assert (x > 3).sum() == len(x.unique()) == 5 and dry.result == expected
    assert dry.peak.total == real.peak.total and not any("placeholder" in note for note in dry.notes)


@pytest.mark.parametrize("size", [-1, True, "all", lambda shape: None])
def test_a_size_that_is_none_is_refused(size):
    line = inspect.getsourcelines(routed)[1] + 1
    with pytest.raises(ValueError, match="sizes=|expected a number of elements, a share"):
        memory.dry_run(routed, torch.rand(3), torch.rand(3) > 0, sizes={f"{HERE}:{line}": size})


class Experts:
    def forward(self, x):
        return len((x > 0).nonzero()) + len(torch.masked_select(x, x > 1))


class Others(Experts):
    def forward(self, x):
        return len((x > 0).nonzero())


@pytest.mark.parametrize("function", ["forward", "Experts.forward"])
def test_sizes_can_be_declared_for_a_function_whose_lines_move(function):
    """In turn, for what its lines make; a function of the same name in another class is another one."""
    x, sizes = torch.rand(8), {f"{HERE}:{function}": [3, 0.25]}
    assert memory.dry_run(Experts().forward, x, sizes=sizes).result == 3 + 2
    assert memory.dry_run(lambda x: Experts().forward(x) + Experts().forward(x), x, sizes=sizes).result == 2 * (3 + 2)
    if function == "forward":
        assert memory.dry_run(Others().forward, x, sizes=sizes).result == 3
    else:
        with pytest.raises(ValueError, match="Declare how many elements it finds"):
            memory.dry_run(Others().forward, x, sizes=sizes)
    with pytest.raises(ValueError, match="Declare how many elements it finds"):
        memory.dry_run(Experts().forward, x, sizes={f"{HERE}:xperts.forward": 3, "other.py:forward": 3})


def test_compiled_code_runs_uncompiled_and_the_notes_say_so():
    (backend, calls), lines, x = counting_backend(), torch.nn.Linear(8, 8), torch.randn(4, 8)
    torch._dynamo.reset()
    model = torch.compile(lines, backend=backend)
    @torch.compile(backend=backend)
    def loss(y):
        return y.square().sum()
    t = memory.dry_run(lambda m, x: loss(m(x)).backward(), model, x)
    assert not calls
    assert [note.partition(": ")[2] for note in t.notes] == [
        "`m(x)` runs uncompiled in a dry run", "`loss(m(x))` runs uncompiled in a dry run"]
    assert t.peak == memory.dry_run(lambda m, x: m(x).square().sum().backward(), lines, x).peak
    model(x).sum().backward()
    assert len(calls) == 1  # afterwards as before
    torch._dynamo.reset()


def test_what_is_known_is_not_computed_where_the_result_is_large():
    def mask():
        return torch.arange(4096)[:, None] > torch.arange(4096)
    memory.dry_run(mask)
    with memory.measure("cpu") as m:
        t = memory.dry_run(mask)
    assert t.peak.total >= 4096 * 4096 and m.peak < 2**20


def test_values_of_64_kib_are_known_and_of_more_are_not():
    def read():
        return [torch.arange(float(n))[3].item() for n in (2**14, 2**14 + 1)]

    def computed():
        return [(torch.arange(64.0).view(64, 1) * torch.ones(1, n))[3, 0].item() for n in (256, 257)]

    assert memory.dry_run(read).result == memory.dry_run(computed).result == [3.0, 0.0]
