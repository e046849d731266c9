"""The tracker against the CPU allocator, and every category; each with a tracker that is broken."""

from dataclasses import replace

import pytest
import torch

from refimpl import memory
from refimpl.bench.meter import Size, TrainingStep
from refimpl.bench.runner import compare
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

    def offered(self, tensor):
        pass


class CallsEverythingAliveAnActivation(Tracker):
    def _where(self):
        for index, _ in self._alive.values():
            self.records[index].saved = True
        return super()._where()


def check_agreement(tracker_type, model, optimizer, tokens):
    """One step under both instruments: peaks within 0.5 %, net exactly equal."""
    with tracker_type(model, optimizer, tokens) as t, memory.measure("cpu") as m:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    assert abs(t.peak.total - t.start.total - m.peak) <= 0.005 * m.peak
    assert t.now.total - t.start.total == m.net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_peak_and_net_are_the_allocators(dtype, dropout, family):
    llama = {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
    config = GPTConfig(vocab_size=256, context_length=128, layers=3, hidden=96, heads=4, dropout=dropout,
                       tied=family == "gpt2", **(llama if family == "llama" else {}))
    model = GPT(config, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 128))
    for _ in range(2):  # the first step creates the optimizer's state, the second finds it there
        check_agreement(Tracker, model, optimizer, tokens)


@pytest.mark.parametrize("broken", [NeverFrees, CountsViews])
def test_a_broken_tracker_does_not_agree_with_the_allocator(broken, trained):
    model, optimizer, _ = trained
    with pytest.raises(AssertionError):
        check_agreement(broken, model, optimizer, torch.randint(0, 256, (2, 64)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_stay_and_set_to_none_go(trained, set_to_none):
    model, optimizer, _ = trained
    tokens = torch.randint(0, 256, (2, 16))
    with memory.track(model, optimizer) as t:
        model(tokens, tokens).backward()
        held = t.now["gradients"]
        optimizer.zero_grad(set_to_none=set_to_none)
    assert held == 4 * model.config.parameter_count()
    assert t.now["gradients"] == (0 if set_to_none else held)


def test_gradients_that_are_views_of_one_flat_buffer_count_once(trained):
    model, _, _ = trained
    tokens = torch.randint(0, 256, (2, 16))
    count = model.config.parameter_count()
    with memory.track(model) as t:
        flat, offset = torch.zeros(count + 100), 0
        for p in model.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        model(tokens, tokens).backward()
    assert t.now["gradients"] == 4 * (count + 100)


def test_older_gradients_and_optimizer_state_have_their_categories(trained):
    model, optimizer, step = trained
    step()
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    with memory.track(model, optimizer) as t:
        pass
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    assert t.start == memory.model_state_bytes(count, "adamw", tensors=tensors)


def test_optimizer_state_that_is_created_in_the_step_has_its_category(trained):
    model, optimizer, step = trained
    with memory.track() as t:  # nothing named: model and optimizer are found
        step()
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    assert t.now["optimizer state"] == 8 * count + 4 * tensors
    assert t.now["parameters"] == 4 * count


def test_momentum_and_lbfgs_states_are_found():
    for make, states in ((lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1), (torch.optim.LBFGS, 3)):
        model = torch.nn.Linear(50, 50, bias=False)
        optimizer = make(model.parameters())

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 50)).square().sum()
            loss.backward()
            return loss

        with memory.track() as t:
            optimizer.step(closure)
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
        second = t.now
    assert first["activations"] == 4000 and second["activations"] == 0


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
    master = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)
    with memory.track(model, optimizer) as t:
        pass
    assert t.now == {"parameters": 200, "optimizer state": 400}
    with memory.track(optimizer) as t:
        pass
    assert t.now == {"parameters": 400}


@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_are_the_models_arguments(by_name):
    model, tokens = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with memory.track() as t:
        for x in (tokens, torch.randn(2, 8)):
            model(input=x) if by_name else model(x)
        del x
    assert t.start["inputs"] == 4 * 8 * 4
    assert t.timeline.nbytes[:, t.timeline.categories.index("inputs")].max() == 6 * 8 * 4


def test_bad_objects_and_second_use_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"track\(str\)"), memory.track(model, "model"):
        pass
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.raises(TypeError, match="not a model's parameters: the model"), memory.track(model.parameters()):
        pass
    batch = torch.zeros(25)
    with memory.track({"batch": batch}) as t:
        pass
    assert t.now == {"inputs": 100}
    with memory.track() as t:
        torch.zeros(1)
    with pytest.raises(RuntimeError, match="again for a new one"), t:
        pass
    with pytest.raises(ValueError, match="no operation ran in phase 'step'"):
        t.peak_moment("step")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_tracked_step_costs_at_most_three_times_a_plain_one():
    """In alternation, at a size where operations do some work; with nearly none, the price is Python's (see bench)."""
    step = TrainingStep(Size(layers=3, hidden=128, heads=4, vocab_size=256, batch=4, sequence=64))
    assert compare({"tracked": step.tracked, "plain": step}, rounds=7).ratio("tracked", "plain") <= 3
