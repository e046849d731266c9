"""The dry run reads what the real run reads, to the byte, and takes no memory."""

import copy
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import LLAMA, NEOX
from patience import patiently, processor_seconds, within
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.checkpoint import checkpoint

from refimpl import memory
from refimpl.common.nested_tensors import tensors_in
from refimpl.memory.dry_running import _trackable
from refimpl.model import GPT, GPTConfig

from ..conftest import SMALL

CONFIGS = {
    "gpt2": SMALL, "gpt2, dropout": replace(SMALL, dropout=0.1),
    "llama": replace(SMALL, **LLAMA, mlp_hidden=88), "neox": replace(SMALL, **NEOX)}


def step_of(model, optimizer, batch):
    model(batch["tokens"], batch["tokens"]).backward()
    optimizer.step()
    optimizer.zero_grad()


def build_and_step(config, dtype, optimizer=torch.optim.AdamW):
    model = GPT(config, dtype=dtype)
    optimizer, batch = optimizer(model.parameters(), lr=1e-3), {"tokens": torch.randint(0, 256, (2, 48))}
    for _ in range(2):
        step_of(model, optimizer, batch)


def same(real, dry):
    a, b = real.timeline, dry.timeline
    return [op[:3] for op in a.ops] == [op[:3] for op in b.ops] and (a.nbytes == b.nbytes).all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_same_code_reads_the_same_at_every_operation(name, dtype, optimizer):
    with memory.track() as real:
        build_and_step(CONFIGS[name], dtype, optimizer)
    dry = memory.dry_run(build_and_step, CONFIGS[name], dtype, optimizer)
    assert same(real, dry) and dry.peak == real.peak and dry.now == real.now and dry.top(50) == real.top(50)


def test_another_program_does_not_read_the_same():
    with memory.track() as real:
        build_and_step(CONFIGS["gpt2"], torch.float32)
    assert not same(real, memory.dry_run(build_and_step, CONFIGS["gpt2, dropout"], torch.float32))
    assert not same(real, memory.dry_run(build_and_step, CONFIGS["gpt2"], torch.bfloat16))


def test_models_optimizers_and_tensors_can_be_given(trained):
    model, optimizer, step = trained
    step()
    batch = {"tokens": torch.randint(0, 256, (2, 32))}
    dry = memory.dry_run(step_of, model, optimizer, batch=batch)
    with memory.track(model, optimizer, batch["tokens"]) as real:
        step_of(model, optimizer, batch)
    assert dry.start == real.start and same(real, dry)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))


def with_batch(requires_grad=False):
    return mlp(), torch.randn(4, 32, requires_grad=requires_grad)


def backward(model, x):
    model(x).sum().backward()


def train(model, optimizer, x):
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()


def after_a_step(optimizer):
    """Given: a model with gradients, and an optimizer with state."""
    model, x = with_batch()
    optimizer = optimizer(model.parameters())
    backward(model, x)
    optimizer.step()
    return model, optimizer, x


class Averaged(torch.optim.SGD):
    """Keeps an average of the weights as an attribute of its own, which deepcopy leaves behind."""
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self):
        super().step()
        torch._foreach_lerp_(self.average, [p.detach() for group in self.param_groups for p in group["params"]], 0.1)


def tied():
    one, (two, x) = mlp(), with_batch()
    two[0].weight = one[0].weight
    return one, two, x


def state_to_bf16(model, optimizer, x):
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16()


def clipped(model, x):
    backward(model, x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scheduled(model, optimizer, x):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        train(model, optimizer, x)
        schedule.step()


def averaged(model, x):
    average = torch.optim.swa_utils.AveragedModel(model)  # a deepcopy, made inside
    backward(model, x)
    average.update_parameters(model)


def with_schedule():
    """The scheduler has put a step of its own in the optimizer's place."""
    model, optimizer, x = after_a_step(torch.optim.AdamW)
    return model, optimizer, x, torch.optim.lr_scheduler.StepLR(optimizer, 1)


STEPS = {  # name -> (what makes the arguments, the step)
    "views of one storage": (lambda: torch.randn(1000).split(500), lambda a, b: (a * b).sum()),
    "a view of a large storage": (lambda: (torch.randn(1000)[10:20],), lambda a: a * 2),
    "strided": (lambda: (torch.randn(30, 40)[:, ::2],), lambda a: a.reshape(-1)),
    "expanded": (lambda: (torch.randn(30, 1).expand(30, 40),), lambda a: a + 1),
    "complex": (lambda: (torch.randn(4, dtype=torch.complex64),), lambda a: torch.view_as_real(a.conj() * 2)),
    "weights tied across models": (tied, lambda one, two, x: (one(x) + two(x)).sum().backward()),
    "with gradients and Adam's state": (lambda: after_a_step(torch.optim.AdamW), train),
    "a learning rate in a tensor": (lambda: after_a_step(partial(torch.optim.AdamW, lr=torch.tensor(0.1))), train),
    "foreach": (lambda: after_a_step(partial(torch.optim.AdamW, foreach=True)), train),
    "fused": (lambda: after_a_step(partial(torch.optim.AdamW, fused=True)), train),
    "momentum": (lambda: after_a_step(partial(torch.optim.SGD, lr=0.1, momentum=0.9)), train),
    "in an object": (  # where no search through lists and dicts finds them
        lambda: (SimpleNamespace(given=after_a_step(torch.optim.AdamW)),), lambda run: train(*run.given)),
    "an optimizer's own attributes": (lambda: after_a_step(Averaged), train),
    "a scheduler": (lambda: after_a_step(torch.optim.AdamW), scheduled),
    "a scheduler that is there": (with_schedule, lambda m, o, x, schedule: (train(m, o, x), schedule.step())),
    "a number in a tensor": (lambda: (torch.tensor(3),), lambda a: a * 2),
    "state made smaller": (lambda: after_a_step(torch.optim.AdamW), state_to_bf16),
    "arguments let go": (lambda: ([torch.zeros(1000), torch.zeros(10)],), list.pop),
    "a gradient of the input": (partial(with_batch, True), backward), "gradients clipped": (with_batch, clipped),
    "weights averaged": (with_batch, averaged),
    "recomputed": (partial(with_batch, True), lambda m, x: checkpoint(m, x, use_reentrant=False).sum().backward()),
    "recomputed, reentrant": (
        partial(with_batch, True), lambda m, x: checkpoint(m, x, use_reentrant=True).sum().backward()),
    "autocast": (with_batch, lambda m, x: torch.autocast("cpu", torch.bfloat16)(backward)(m, x)),
    "a model in a partial": (lambda: (partial(backward, mlp()), torch.randn(4, 32)), lambda f, x: f(x))}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor", "ignore:Detected call of `lr_scheduler",
                            "ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("name", STEPS)
def test_what_is_given_reads_as_the_real_thing(name):
    make, step = STEPS[name]
    arguments = make()
    dry = memory.dry_run(step, *arguments)
    del dry.result  # what a step returns is alive as long as the tracker
    named = [found for a in arguments for found in _trackable(vars(a) if isinstance(a, SimpleNamespace) else a)]
    named += [p for item in arguments if isinstance(item, partial) for p in item.args]
    with memory.track(*named) as real:
        step(*arguments)
    a, b = dry.timeline.totals[:-1], real.timeline.totals[:-1]  # before the result is let go
    assert [op[:2] for op in dry.ops] == [op[:2] for op in real.ops] and a.tolist() == b.tolist()
    if name not in NOT_FOUND_BEFORE_THEY_RUN:
        assert dry.start == real.start and dry.peak == real.peak


# Inside an object or a partial the dry run finds models and optimizers when they run, by category; totals are the same.
NOT_FOUND_BEFORE_THEY_RUN = ("in an object", "a model in a partial")


def test_what_is_given_and_not_used_was_there():
    dry = memory.dry_run(lambda *given: None, {"a": torch.zeros(100), "b": [(torch.zeros(10),)]}, torch.nn.Linear(5, 5))
    assert dry.start == {"inputs": 440, "parameters": 120}


def test_the_originals_keep_their_values_and_gradients(trained):
    model, optimizer, step = trained
    step()
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    before = copy.deepcopy([list(model.parameters()), [p.grad for p in model.parameters()], optimizer.state_dict()])
    def spoil(model, optimizer):
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
                p.grad.zero_()
    memory.dry_run(spoil, model, optimizer)
    after = [list(model.parameters()), [p.grad for p in model.parameters()], optimizer.state_dict()]
    assert all(torch.equal(a, b) for a, b in zip(tensors_in(before), tensors_in(after), strict=True))


def test_the_result_is_kept():
    assert memory.dry_run(lambda: torch.empty(2**40)).result.shape == (2**40,)


@pytest.mark.parametrize("argument", [(x for x in ()), torch.Generator(), threading.Lock()])
def test_an_argument_that_cannot_be_copied_is_refused(argument):
    with pytest.raises(ValueError, match="an argument cannot be copied: build it inside"):
        memory.dry_run(lambda argument: None, argument)


@pytest.mark.parametrize("error", [ZeroDivisionError, AssertionError, TypeError, RuntimeError, KeyboardInterrupt])
def test_the_steps_own_errors_stay_what_they_are(error):
    def step():
        raise error("of the step")
    with pytest.raises(error, match="of the step"):
        memory.dry_run(step)
    assert FakeTensor not in _foreach_supported_types


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="cuda:0 need a GPU"):
        memory.dry_run(lambda: torch.empty(3, device="cuda"))


BIG = """
import re, sys, time, torch
from pathlib import Path
from refimpl import memory
from refimpl.model import GPT, GPTConfig
def build_and_step(name):
    config = GPTConfig.named(name)
    model = GPT(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (1, config.context_length))
    model(tokens, tokens).backward()
    optimizer.step()
memory.dry_run(lambda: torch.ones(1) + 1)  # the first use of fake tensors imports what they need
start = time.process_time()
t = memory.dry_run(build_and_step, {name!r})
if sys.platform == "linux":  # getrusage's has in it what the process had that started this one
    resident = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
else:
    import resource
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(time.process_time() - start, resident, t.peak["parameters"], t.peak.total)
"""


@pytest.mark.parametrize("name", ["gpt3-175b", "llama2-7b"])
@patiently
def test_a_step_of_a_model_that_no_machine_holds(name):
    """In a process of its own: under 10 s (of processor time, which a busy machine does not stretch) and 2 GB."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", BIG.replace("{name!r}", repr(name))], cwd=root, capture_output=True,
                          text=True, check=True)
    seconds, resident, parameters, peak = map(float, done.stdout.split())
    assert parameters == 2 * GPTConfig.named(name).parameter_count() < peak / 4 and resident < 2e9
    within(processor_seconds(seconds), 10)


def test_what_a_library_keeps_without_a_rule_is_named():
    """oneDNN's recurrent layer on a CPU: its workspace is most of what a real step keeps."""
    layer, x = torch.nn.LSTM(8, 16), torch.randn(20, 4, 8)

    def step(layer, x):
        layer(x)[0].sum().backward()

    dry = memory.dry_run(step, layer, x)
    with memory.track(layer, x) as real:
        step(layer, x)
    said = any("mkldnn_rnn_layer.default keeps for backward" in note for note in dry.notes)
    assert said == (real.peak.total > 1.1 * dry.peak.total)
    assert not memory.dry_run(step, torch.nn.GRU(8, 16), x).notes


def test_a_storage_that_a_second_tensor_shares_is_freed_with_it():
    """PyTorch keeps the results of fake operations by their arguments, of which one is the storage here."""
    def share():
        whole = torch.ones(1000)
        second = torch.empty(0).set_(whole.untyped_storage())
        with memory.track(whole) as t:
            del whole
            held = t.now.total
            del second
            return held, t.now.total

    assert memory.dry_run(share).result == share() == (4000, 0)


def test_a_number_may_be_made_where_meta_is_the_default():
    """`torch.tensor` asks no mode: what it makes there is a plain tensor on the meta device, of no bytes."""
    def built():
        with torch.device("meta"):
            module = torch.nn.Linear(2, 2)
            module.register_buffer("scale", torch.nn.Buffer(torch.tensor(3.0)))
        return module.scale.shape, module.weight.device.type

    assert memory.dry_run(built).result == (torch.Size(()), "meta")
