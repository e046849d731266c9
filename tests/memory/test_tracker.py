"""The tracker against the CPU allocator, and every category; each with a tracker that is broken."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from families import LLAMA
from patience import processor_seconds
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from users_kit import closure_of

from benchmarks.meter import Size, TrainingStep
from benchmarks.runner import compare
from refimpl import memory
from refimpl.memory import Tracker
from refimpl.model import GPT, GPTConfig


class NeverFrees(Tracker):
    def _freed(self, reference):
        self._alive.pop(reference.key, None)


class CountsViews(Tracker):
    """Counts tensors where it should count storages."""
    def _see(self, items, op=None):
        if op and op.name in ("view", "t", "transpose"):
            self.records.append(replace(self.records[-1], nbytes=items[0].nbytes))
            self.events.append((len(self.ops) - 1, len(self.records) - 1, items[0].nbytes))
        super()._see(items, op)


class BlindToSaved(Tracker):
    def saved(self, tensor):
        pass

    offered = saved


class CallsEverythingAliveAnActivation(Tracker):
    def _where(self):
        for index, _ in self._alive.values():
            self.records[index].saved = True
        return super()._where()


def before(*objects):
    """What is there when a tracker of these begins."""
    with memory.track(*objects) as t:
        pass
    assert t.start == t.now
    return t.now


def check_agreement(tracker_type, model, optimizer, tokens):
    """A step under the allocator's log alone and the same under the tracker alone, from the same state of model and
    optimizer: peaks within 0.5 %, net equal."""
    def step(model, optimizer):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    twins = copy.deepcopy((model, optimizer))
    with memory.measure("cpu") as m:
        step(*twins)
    with tracker_type(model, optimizer, tokens) as t:
        step(model, optimizer)
    assert abs(t.peak.total - t.start.total - m.peak) <= 0.005 * m.peak and t.now.total - t.start.total == m.net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_peak_and_net_are_the_allocators(dtype, dropout, family):
    model = GPT(GPTConfig(vocab_size=256, context_length=128, layers=3, hidden=96, heads=4, dropout=dropout,
                          **(LLAMA if family == "llama" else {})), dtype=dtype)
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 256, (2, 128))
    for _ in range(2):  # the first step creates the optimizer's state, the second finds it there
        check_agreement(Tracker, model, optimizer, tokens)


@pytest.mark.parametrize("broken", [NeverFrees, CountsViews])
def test_a_broken_tracker_does_not_agree_with_the_allocator(broken, trained):
    model, optimizer, _ = trained
    with pytest.raises(AssertionError):
        check_agreement(broken, model, optimizer, torch.randint(0, 256, (2, 64)))


def backward(model):
    """Of a batch of 2×16 tokens."""
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_stay_and_set_to_none_go(trained, set_to_none):
    model, optimizer, _ = trained
    with memory.track(model, optimizer) as t:
        backward(model)
        held = t.now["gradients"]
        optimizer.zero_grad(set_to_none=set_to_none)
    assert held == 4 * model.config.parameter_count() and t.now["gradients"] == (0 if set_to_none else held)


def test_gradients_that_are_views_of_one_flat_buffer_count_once(trained):
    model, _, _ = trained
    count = model.config.parameter_count()
    with memory.track(model) as t:
        flat, offset = torch.zeros(count + 100), 0
        for p in model.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        backward(model)
    assert t.now["gradients"] == 4 * (count + 100)


def test_older_gradients_and_optimizer_state_have_their_categories(trained):
    model, optimizer, step = trained
    step()
    backward(model)
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    assert before(model, optimizer) == memory.model_state_bytes(count, "adamw", tensors=tensors)


def test_optimizer_state_that_is_created_in_the_step_has_its_category(trained):
    model, optimizer, step = trained
    with memory.track() as t:  # nothing named: model and optimizer are found
        step()
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    assert t.now["optimizer state"] == 8 * count + 4 * tensors and t.now["parameters"] == 4 * count


def test_momentum_and_lbfgs_states_are_found():
    for make, states in ((lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1), (torch.optim.LBFGS, 3)):
        model = torch.nn.Linear(50, 50, bias=False)
        optimizer = make(model.parameters())
        with memory.track() as t:
            optimizer.step(closure_of(optimizer, lambda model=model: model(torch.ones(3, 50)).square().sum()))
        assert t.now["optimizer state"] >= states * 10_000


def test_several_backwards_keep_activations_until_the_last():
    x = torch.randn(1000, requires_grad=True)
    with memory.track() as t:
        y = x.exp()
        loss = y.sum()
        loss.backward(retain_graph=True)
        first = t.now
        loss.backward()
        del y
        assert first["activations"] == 4000 and t.now["activations"] == 0


def test_activations_are_what_autograd_saved_not_what_is_alive():
    def step(tracker_type):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        x = torch.randn(32, 64)
        with tracker_type(model) as t:
            hidden = model[0](x)
            logits = model[2](model[1](hidden))
            before = t.now
            logits.sum().backward()
        return before, t.now
    before, after = step(Tracker)
    assert before["activations"] == 4 * 32 * 64  # ReLU's output; hidden and logits are only held by the user
    assert before["temporaries"] == 4 * 32 * (64 + 10)
    assert after["activations"] == 0 and after["temporaries"] == before["temporaries"]
    for broken in (BlindToSaved, CallsEverythingAliveAnActivation):
        assert step(broken)[0]["activations"] != 4 * 32 * 64


def test_sparse_gradients_count_their_parts():
    embedding = torch.nn.Embedding(1000, 16, sparse=True)
    with memory.track(embedding) as t:
        embedding(torch.tensor([1, 5, 7])).sum().backward()
    assert t.now["gradients"] == 3 * 16 * 4 + 3 * 8


def test_master_weights_are_optimizer_state_and_bare_tensors_parameters():
    model = torch.nn.Linear(10, 10, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([model.weight.detach().float().requires_grad_()], lr=0.1)
    assert before(model, optimizer) == {"parameters": 200, "optimizer state": 400}
    assert before(optimizer) == {"parameters": 400}


@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_are_the_models_arguments(by_name):
    model, tokens = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with memory.track() as t:
        for x in (tokens, torch.randn(2, 8)):
            model(input=x) if by_name else model(x)
        del x
    assert t.start["inputs"] == 4 * 8 * 4
    assert t.timeline.nbytes[:, t.timeline.categories.index("inputs")].max() == 6 * 8 * 4


class FreesGradients(torch.optim.SGD):
    def step(self):
        super().step()
        self.zero_grad()


def test_gradients_assigned_by_hand_are_gradients():
    model = torch.nn.Linear(50, 50, bias=False)
    with memory.track(model) as t:
        model.weight.grad = torch.ones(50, 50)
    assert t.now["gradients"] == 10_000
    model.weight.grad = None
    with memory.track(model) as t:
        model.weight.grad = torch.ones(50, 50)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.weight.grad = None
    assert t.peak["gradients"] == 10_000 and t.now["gradients"] == 0
    x = torch.ones(1000, requires_grad=True)
    with memory.track() as t:
        x.grad = torch.ones(1000)
        FreesGradients([x]).step()
    assert t.peak["gradients"] == 4000 and t.now["gradients"] == 0


def test_older_gradients_of_a_model_that_is_found_are_gradients():
    model, x = torch.nn.Linear(50, 50, bias=False), torch.ones(2, 50)
    model(x).sum().backward()
    with memory.track() as t:
        model(x)
        model.zero_grad()
    assert t.start == {"parameters": 10_000, "gradients": 10_000, "inputs": 400}


def test_a_parameter_is_watched_once(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer):
        step()
        step()
        assert {len(p._post_accumulate_grad_hooks) for p in model.parameters()} == {1}


def test_an_inputs_gradient_is_a_gradient():
    model, x = torch.nn.Linear(50, 50, bias=False), torch.ones(20, 50, requires_grad=True)
    model.requires_grad_(False)
    with memory.track() as t:
        model(x).sum().backward()
    assert t.now == {"parameters": 10_000, "inputs": 4000, "gradients": 4000}


def test_what_one_model_makes_is_no_input_of_the_next():
    first, second, x = torch.nn.Linear(50, 50), torch.nn.Linear(50, 50), torch.ones(2, 50)
    with torch.no_grad(), memory.track(first, second, x) as t:
        second(first(x))
    assert t.peak["inputs"] == 400
    shift = torch.ones(50, requires_grad=True)
    with memory.track(first, x, shift) as t:
        first(x + shift)
    assert t.peak["inputs"] == 400 + 200


def test_what_one_backward_made_and_another_freed_is_no_activation():
    held, x = [], torch.ones(1000, requires_grad=True)
    with memory.track(x) as t:
        for act in (lambda grad: held.append(grad * 1), lambda grad: held.clear()):
            y = x * 2
            y.register_hook(act)
            y.sum().backward()
            del y
    assert "activations" not in {t.categories()[i] for i, record in enumerate(t.records) if record.phase == "backward"}


def test_what_the_program_lets_go_goes():
    x, model = torch.zeros(1000), torch.nn.Linear(10, 10, bias=False)
    with memory.track([x], model) as t:
        del x
        assert t.now == {"parameters": 400}
        del model
        gc.collect()
        assert t.now.total == 0
    assert t.start == {"inputs": 4000, "parameters": 400}


def test_parameters_can_be_exchanged_afterwards():
    model = torch.nn.Linear(10, 10)
    with memory.track(model):
        model(torch.ones(1, 10)).sum().backward()
    model.zero_grad()
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(10, 10)))
    assert not model.weight.any()


def test_a_name_ends_with_its_module():
    """Ids are used again: a model built where another was deleted has names of its own."""
    with memory.track() as t:
        for i in range(6):
            model = torch.nn.Sequential()
            model.add_module(f"layer{i}", torch.nn.Linear(4, 4))
            model(torch.ones(1, 4))
            del model
    assert [op.module for op in t.ops if op.name == "addmm"] == [f"layer{i}" for i in range(6)]


def test_sharded_parameters_are_read_as_the_allocator_reads_them():
    """FSDP2 on one rank: its parameters are DTensors, and it frees and takes them by resizing."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer, count = torch.optim.AdamW(model.parameters()), sum(p.numel() for p in model.parameters())
        with memory.track(model, optimizer) as t, memory.measure("cpu") as m:
            for _ in range(2):
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert t.start == {"parameters": 4 * count}
        assert t.now == {"parameters": 4 * count, "optimizer state": 8 * count + 4 * 4}
        assert t.peak.total - t.start.total == m.peak
    finally:
        torch.distributed.destroy_process_group()


def test_bad_objects_and_second_use_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"track\(str\)"), memory.track(model, "model"):
        pass
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.raises(TypeError, match="not a model's parameters: the model"), memory.track(model.parameters()):
        pass
    assert before({"batch": torch.zeros(25)}) == {"inputs": 100}
    with memory.track() as t:
        torch.zeros(1)
    with pytest.raises(RuntimeError, match="again for a new one"), t:
        pass
    with pytest.raises(ValueError, match="no operation ran in phase 'step'"):
        t.peak_moment("step")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.alone
def test_a_tracked_step_costs_at_most_three_times_a_plain_one():
    """In alternation, at a size where operations do some work; with nearly none, the price is Python's (see bench).

    What is added is Python's own work, so it counts in seconds of the processor where the bound was set. On any
    processor it is held to a mode that does nothing, which takes half of it.
    """
    step = TrainingStep(Size(layers=3, hidden=128, heads=4, vocab_size=256, batch=4, sequence=64))

    def watched_by_nobody():
        with Nothing():
            step()

    read = compare({"tracked": step.tracked, "plain": step, "nobody": watched_by_nobody}, rounds=7)
    assert 1 + processor_seconds(read.ratio("tracked", "plain") - 1) <= 3
    assert read.ratio("tracked", "nobody") <= 2.2


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_a_step_of_some_parameters_looks_at_their_state_alone(monkeypatch):
    """As an engine's that updates a bucket at a time: to look at all each time would take most of a large step."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(30)]
    optimizer, looked = torch.optim.Adam(parameters), []
    role = Tracker._role
    monkeypatch.setattr(Tracker, "_role", lambda self, tensor, name, *of: (
        looked.append(name), role(self, tensor, name, *of)))
    with memory.track(optimizer) as t:
        for parameter in parameters:
            optimizer.param_groups[0]["params"] = [parameter]
            parameter.grad = torch.ones(3)
            optimizer.step()
        in_steps = looked.count("optimizer state")
    assert in_steps == 3 * len(parameters)  # after its step; before it there was none
    assert t.now["optimizer state"] == len(parameters) * (2 * 12 + 4)


def test_tab_completion_lists_what_users_call():
    with memory.track() as t:
        torch.zeros(1)
    names = set(dir(t))
    assert {"peak", "now", "start", "timeline", "top", "held", "plot", "save", "to_html", "export_snapshot", "ops",
            "records", "events", "notes"} <= names
    public = {name for name in names if not name.startswith("_")}
    assert public == {name for name in dir(memory.Trace()) if not name.startswith("_")} and len(public) < 40
    assert not public & {"enter_module", "saved", "packed", "own_parameter", "push", "only_watches", "marked"}
