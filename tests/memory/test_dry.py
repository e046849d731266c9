"""The dry run reads what the real run reads, to the byte, and takes no memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refimpl import memory
from refimpl.model import GPT, GPTConfig

SHAPE = {"vocab_size": 256, "context_length": 64, "layers": 2, "hidden": 32, "heads": 4}
CONFIGS = {
    "gpt2": GPTConfig(**SHAPE),
    "gpt2, dropout": GPTConfig(**SHAPE, dropout=0.1),
    "llama": GPTConfig(**SHAPE, kv_heads=2, mlp_hidden=88, norm="rmsnorm", activation="swiglu", positions="rotary",
                       bias=False, tied=False),
    "neox": GPTConfig(**SHAPE, positions="rotary", rotary_fraction=0.25, parallel_residual=True, tied=False),
}


def build_and_step(config, dtype, optimizer=torch.optim.AdamW, steps=2):
    model = GPT(config, dtype=dtype)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 48))
    for _ in range(steps):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


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
    assert same(real, dry)
    assert dry.peak == real.peak and dry.now == real.now and dry.top(50) == real.top(50)


def test_another_program_does_not_read_the_same():
    with memory.track() as real:
        build_and_step(CONFIGS["gpt2"], torch.float32)
    assert not same(real, memory.dry_run(build_and_step, CONFIGS["gpt2, dropout"], torch.float32))
    assert not same(real, memory.dry_run(build_and_step, CONFIGS["gpt2"], torch.bfloat16))


def test_models_optimizers_and_tensors_can_be_given(trained):
    model, optimizer, step = trained
    step()
    tokens = torch.randint(0, 256, (2, 32))

    def train(model, optimizer, batch):
        model(batch["tokens"], batch["tokens"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    dry = memory.dry_run(train, model, optimizer, batch={"tokens": tokens})
    with memory.track(model, optimizer, tokens) as real:
        train(model, optimizer, {"tokens": tokens})
    assert dry.start == real.start and same(real, dry)


def test_the_originals_keep_their_values(trained):
    model, optimizer, _ = trained
    before = [p.clone() for p in model.parameters()]

    def clear(model):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()

    memory.dry_run(clear, model)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_the_result_is_kept():
    assert memory.dry_run(lambda: torch.empty(2**40)).result.shape == (2**40,)


def test_values_and_strange_tensors_are_refused_with_what_to_do():
    outside = torch.ones(3)
    with pytest.raises(ValueError, match=r"needs the values of a tensor.*\.item\(\)"):
        memory.dry_run(lambda: torch.ones(3).sum().item())
    with pytest.raises(ValueError, match="masks"):
        memory.dry_run(lambda: torch.ones(3)[torch.ones(3) > 0])
    with pytest.raises(ValueError, match="was not given: build it inside"):
        memory.dry_run(lambda: torch.ones(3) + outside)
    with pytest.raises(ValueError, match="build it in the right one"):
        memory.dry_run(lambda: torch.nn.Linear(3, 3).to(torch.bfloat16))
    with pytest.raises(ZeroDivisionError):
        memory.dry_run(lambda: 1 / 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="cuda:0 need a GPU"):
        memory.dry_run(lambda: torch.empty(3, device="cuda"))


BIG = """
import resource, time, torch
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
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(time.process_time() - start, resident, t.peak["parameters"], t.peak.total)
"""


@pytest.mark.parametrize("name", ["gpt3-175b", "llama2-7b"])
def test_a_step_of_a_model_that_no_machine_holds(name):
    """In a process of its own: under 10 s (of processor time, which a busy machine does not stretch) and 2 GB."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", BIG.replace("{name!r}", repr(name))], cwd=root, capture_output=True,
                          text=True, check=True)
    seconds, resident, parameters, peak = map(float, done.stdout.split())
    assert parameters == 2 * GPTConfig.named(name).parameter_count()
    assert peak > 8 * GPTConfig.named(name).parameter_count()
    assert seconds < 10 and resident < 2e9
