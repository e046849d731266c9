"""The tracker against what must hold of it, and against the CPU allocator; each with a tracker that is broken."""

import contextlib
import gc
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from refimpl import memory
from refimpl.memory import Tracker
from refimpl.model import GPT, GPTConfig

MiB = 2**20


class NeverFrees(Tracker):
    def _freed(self, reference):
        self._alive.pop(reference.key, None)


class CountsViews(Tracker):
    """Counts tensors where it should count storages."""

    def _see(self, tree, op=None):
        if isinstance(tree, torch.Tensor) and op and op.name in ("view", "t", "transpose"):
            self.records.append(replace(self.records[-1], nbytes=tree.nbytes))
            self.events.append((len(self.ops) - 1, len(self.records) - 1, tree.nbytes))
        super()._see(tree, op)


class BlindToResize(Tracker):
    def resized(self, storage, before):
        pass


class BlindToSaved(Tracker):
    def saved(self, tensor):
        pass

    def offered(self, tensor):
        pass


class CallsEverythingAliveAnActivation(Tracker):
    def _before(self):
        for index, _ in self._alive.values():
            self.records[index].saved = True


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


PROGRAM = st.lists(st.tuples(st.sampled_from("new view inplace add delete resize cat".split()), st.integers(0, 7),
                             st.integers(1, 400)), min_size=3, max_size=25)


def run_program(program):
    held = [torch.empty(10)]
    for what, which, size in program:
        x = held[which % len(held)]
        if what == "new":
            held.append(torch.empty(size))
        elif what == "view":
            held.append(x[: len(x) // 2])
        elif what == "inplace":
            x.mul_(x)
        elif what == "add":
            held.append(x + x)
        elif what == "cat":
            held.append(torch.cat([x, *held[:2]]))
        elif what == "delete" and len(held) > 1:
            held.pop(which % len(held))
        elif what == "resize" and x._base is None and sum(x is not y and x.untyped_storage() is y.untyped_storage()
                                                          for y in held) == 0:
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(4 * len(x))
        del x
    return held


@settings(max_examples=40, deadline=None)
@given(PROGRAM)
def test_any_program_of_tensors_reads_the_same_on_both_instruments(program):
    with memory.track() as t, memory.measure("cpu") as m:
        held = run_program(program)
    scratch = 64  # a kernel's own scalars
    assert m.peak - scratch <= t.peak.total <= m.peak
    assert t.now.total == m.net
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held}
    assert t.now.total == sum(storages.values())
    assert (t.timeline.nbytes >= 0).all()


def test_categories_sum_to_the_total_at_every_point(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    assert len(t.timeline) > 100
    running = {}
    for index, _, delta in t.events:
        running[index + 1] = running.get(index + 1, 0) + delta
    total = 0
    for row, moment in enumerate(t.timeline):
        total += running.get(row, 0)
        assert sum(moment.ledger.values()) == moment.ledger.total == total


def test_views_and_tied_weights_count_once():
    config = GPTConfig(vocab_size=256, context_length=64, layers=1, hidden=32, heads=4, tied=True)
    with memory.track() as t:
        model = GPT(config)
        views = [model.embedding.weight.view(-1), model.embedding.weight.t(), model.embedding.weight.detach()]
    assert t.now == {"parameters": 4 * config.parameter_count()}
    del views


def test_in_place_operations_take_nothing():
    x = torch.zeros(MiB)
    with memory.track(x) as t:
        x.add_(1).mul_(2).relu_()
    assert t.peak.total == t.start.total == 4 * MiB


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


def test_storages_older_than_the_context_are_there_from_the_start():
    named, touched, untouched = torch.zeros(100), torch.zeros(200), torch.zeros(300)
    with memory.track(named) as t:
        touched.sum()
        assert t.now.total == 1200
    assert t.start.total == 1200
    assert untouched.sum() == 0


def test_older_gradients_and_optimizer_state_have_their_categories(trained):
    model, optimizer, step = trained
    step()
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    with memory.track(model, optimizer) as t:
        pass
    count, tensors = model.config.parameter_count(), len(list(model.parameters()))
    assert t.start == memory.model_state_bytes(count, "adamw", tensors=tensors)


def test_tensors_freed_on_another_thread_are_freed():
    with memory.track() as t:
        held = [torch.zeros(1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert t.peak.total == 4000 and t.now.total == 0


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


class Keeps(torch.autograd.Function):
    """x², keeping a bf16 copy the proper way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.bfloat16())
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].float()


class Hides(Keeps):
    """The same, where no hook sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.copy = x.bfloat16()
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.copy.float()


@pytest.mark.parametrize("function", [Keeps, Hides])
def test_what_a_custom_function_keeps_is_an_activation(function):
    x = torch.randn(1000, requires_grad=True)
    with memory.track(x) as t:
        y = function.apply(x)
        y.sum().backward()
        del y
    forward = t.peak_moment("forward").ledger
    assert forward["activations"] == 2000
    assert torch.allclose(x.grad, 2 * x, rtol=1e-2)


def test_an_exception_leaves_the_trace_readable_and_torch_as_it_was(trained):
    model, optimizer, step = trained
    before = (torch.autograd.graph.saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_,
              torch.autograd.Function.apply.__func__)
    with pytest.raises(KeyError), memory.track(model, optimizer) as t:
        kept = torch.zeros(1000)
        step()
        raise KeyError("in the middle")
    after = (torch.autograd.graph.saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_,
             torch.autograd.Function.apply.__func__)
    assert before == after
    assert t.now["temporaries"] == kept.nbytes
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch.zeros(10)
    assert t.now["temporaries"] == kept.nbytes


def resize_step(tracker_type):
    """Free a weight after forward and bring it back before backward, as ZeRO-3 does."""
    linear, x = torch.nn.Linear(100, 100, bias=False), torch.randn(5, 100, requires_grad=True)
    values = linear.weight.detach().clone()
    with tracker_type(linear) as t:
        y = linear(x).sum()
        storage = linear.weight.untyped_storage()
        storage.resize_(0)
        low = t.now["parameters"]
        storage.resize_(40_000)
        linear.weight.data.copy_(values)
        y.backward()
    return low, t.now["parameters"]


def test_a_storage_resized_to_nothing_and_back_is_followed():
    assert resize_step(Tracker) == (0, 40_000)
    assert resize_step(BlindToResize) != (0, 40_000)


def test_resizing_operations_are_followed():
    with memory.track() as t:
        x = torch.empty(10)
        x.resize_(1000)
        x.resize_(0)
        torch.add(torch.ones(2000), 1, out=x)
    assert t.now.total == x.untyped_storage().nbytes() == 8000


# --- techniques that install hooks of their own ----------------------------------------------------------------------


class Held:
    """A handle that no search through lists and dicts looks into."""

    def __init__(self, tensor):
        self.tensor = tensor


HOOKS = {  # name -> (pack, unpack, bytes that live on, per element of the saved tensor)
    "identity": (lambda t: t.detach(), lambda t: t, 4),
    "handle": (lambda t: Held(t.detach()), lambda h: h.tensor, 4),
    "half the bits": (lambda t: t.bfloat16(), lambda t: t.float(), 2),
    "half, in a handle": (lambda t: Held(t.bfloat16()), lambda h: h.tensor.float(), 2),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_category_stays_right_under_a_techniques_hooks(name):
    pack, unpack, width = HOOKS[name]
    x = torch.randn(1000, requires_grad=True)
    with memory.track(x) as t:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = x.exp().sum()
        assert t.now["activations"] == 1000 * width
        loss.backward()
        peak, after = t.peak_moment("forward").ledger, t.now
    assert after["activations"] == 0
    assert peak["activations"] + peak["temporaries"] >= 1000 * width
    assert t.timeline[-1].ledger["activations"] == 0


def test_hooks_installed_before_the_tracker_still_do_their_work():
    calls = []
    x = torch.randn(1000, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append("pack"), t.bfloat16())[1],
                                                     lambda t: (calls.append("unpack"), t.float())[1])
    with hooks, memory.track() as t:
        loss = x.exp().sum()
        assert t.now["activations"] == 2000
        loss.backward()
    assert calls == ["pack", "unpack"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_leaves_the_block_inputs_and_recomputes_activations(reentrant):
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
        for _ in range(4))
    width = 4 * 32 * 64

    def forward(x, recompute):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        return x.sum()

    readings = {}
    for recompute in (False, True):
        x = torch.randn(32, 64, requires_grad=True)
        with memory.track(layers, x) as t:
            loss = forward(x, recompute)
            before = t.now["activations"]
            loss.backward()
            readings[recompute] = before, t.peak_moment("backward").ledger["activations"]
            del loss
        assert t.now["activations"] == 0
    assert readings[False][0] == 16 * width - 8 * width  # Tanh's outputs, which the next Linear shares
    assert readings[True][0] == 3 * width  # the inputs of blocks 2 to 4; the first is x itself
    assert readings[True][1] >= 3 * width + width  # one block's worth, made again in backward


def test_moving_saved_tensors_to_another_device_is_read_there():
    x = torch.randn(1000, requires_grad=True)

    def step():
        with torch.autograd.graph.save_on_cpu():
            return x.exp().sum()

    with memory.track(x) as t:
        step().backward()
    assert t.devices == ["cpu"] and t.now["activations"] == 0
    with pytest.raises(ValueError, match="'cuda:7'.*saw cpu"):
        t.on("cuda:7")


def test_a_saved_tensor_changed_in_place_is_still_an_error():
    x = torch.randn(10, requires_grad=True)
    with memory.track():
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_double_backward_gives_the_same_gradients():
    def second(x):
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    with memory.track():
        tracked = second(x)
    assert torch.equal(tracked, second(x))


def test_a_graph_that_is_dropped_frees_what_it_saved():
    with memory.track() as t:
        y = torch.randn(1000, requires_grad=True).exp().sigmoid()
        storage = weakref.ref(y.untyped_storage())
        gc.disable()
        del y
        gc.enable()
        assert storage() is None
    assert t.now.total == 0


def test_gradients_freed_inside_backward_by_a_hook_were_gradients(trained):
    """The optimizer stepped inside backward, one parameter at a time, the gradient freed at once."""
    model, _, _ = trained
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    tokens = torch.randint(0, 256, (2, 16))
    with memory.track(model) as t:
        model(tokens, tokens).backward()
    gradients = t.timeline.nbytes[:, t.timeline.categories.index("gradients")]
    assert 0 < gradients.max() < 4 * model.config.parameter_count() / 2
    assert t.now["gradients"] == 0


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


def test_inputs_are_the_models_arguments():
    model, tokens = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with memory.track() as t:
        model(tokens)
        model(torch.randn(2, 8))
    assert t.start["inputs"] == 4 * 8 * 4
    assert t.timeline.nbytes[:, t.timeline.categories.index("inputs")].max() == 6 * 8 * 4


# --- marks, names, processes -----------------------------------------------------------------------------------------


def test_a_marked_storage_has_that_category_before_and_after():
    early = memory.mark(torch.zeros(100), "communication")
    with memory.track(early) as t:
        late = memory.mark(torch.zeros(50)[10:], "paged out")
    assert t.start == {"communication": 400}
    assert t.now == {"communication": 400, "paged out": 200}
    with memory.track(late) as t:
        pass
    assert t.now == {"paged out": 200}


def test_a_mark_ends_with_its_storage():
    memory.mark(torch.zeros(100), "communication")
    with memory.track() as t:
        held = [torch.zeros(100) for _ in range(50)]
    assert t.now == {"temporaries": 400 * len(held)}


def test_operations_and_modules_are_named_in_forward_and_backward(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    where = {(op.name, op.phase, op.module) for op in t.ops}
    assert ("_softmax", "forward", "blocks.1.attention") in where
    assert ("gelu_backward", "backward", "blocks.0.mlp") in where
    assert ("_softmax_backward_data", "backward", "blocks.1.attention") in where
    assert {op.phase for op in t.ops} == {"forward", "backward", "step"}


def test_building_inside_the_context_is_its_own_phase():
    with memory.track() as t:
        model = torch.nn.Linear(4, 4)
        model(torch.zeros(1, 4)).sum().backward()
    assert [run.phase for run in (t.timeline[1], t.timeline[-1])] == ["build", "backward"]
    assert t.peak_moment("build").ledger["parameters"] == 80


def test_top_names_the_largest_holders(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    by_operation, by_module = dict(t.top(100, by="operation")), dict(t.top(100))
    assert by_operation["_softmax"] == 2 * (4 * 2 * 4 * 32 * 32)
    assert by_module["blocks.0.attention"] == by_module["blocks.1.attention"]
    assert sum(by_operation.values()) == sum(by_module.values()) == t.peak.total
    assert dict(t.top(100, by="category")) == t.peak
    assert len(t.top(3)) == 3
    in_step = dict(t.top(100, by="category", phase="step"))
    assert in_step == t.peak_moment("step").ledger and in_step["gradients"]
    with pytest.raises(ValueError, match="by='colour'"):
        t.top(by="colour")


def test_two_trackers_at_once_read_the_same(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as outer, memory.track(model, optimizer) as inner:
        step()
    assert outer.peak == inner.peak and outer.now == inner.now


def test_a_tracker_travels_as_its_trace(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    copy = pickle.loads(pickle.dumps(t))
    assert copy.peak == t.peak and copy.timeline.ops == t.timeline.ops and not isinstance(copy, Tracker)


def test_bad_objects_and_second_use_are_refused():
    with pytest.raises(TypeError, match=r"track\(str\)"), memory.track("model"):
        pass
    with memory.track() as t:
        torch.zeros(1)
    with pytest.raises(RuntimeError, match="again for a new one"), t:
        pass
    with pytest.raises(ValueError, match="no operation ran in phase 'step'"):
        t.peak_moment("step")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_step_that_raises_does_not_stay_the_phase(trained):
    model, optimizer, _ = trained

    class Fails(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise ArithmeticError

    failing = Fails(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 256, (1, 8))
    with memory.track(model, optimizer) as t:
        with contextlib.suppress(ArithmeticError):
            failing.step()
        model(tokens)
    assert t.ops[-1].phase == "forward"
