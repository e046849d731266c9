"""Long sequences on a CUDA device: what is predicted beside its allocator, and chunks beside the whole."""

import pytest
import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, GPTConfig, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor, chunked_step_bytes, longest_sequence, training_step_bytes

CONFIG = GPTConfig(vocab_size=4096, context_length=2048, layers=4, hidden=512, heads=8)
ATTENTIONS = {"dense": softmax_attention, "flash": F.scaled_dot_product_attention}
pytestmark = pytest.mark.usefixtures("clean")


def step_of(call, optimizer, tokens):
    loss = call(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def built(sequence, attention, dtype, chunk_size=None):
    """(call, model, optimizer, tokens), after a first step, which makes the optimizer's states."""
    model = GPT(CONFIG, ATTENTIONS[attention], dtype=dtype, device="cuda")
    call = ChunkedSequenceProcessor(model, chunk_size) if chunk_size else model
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, sequence, dtype=torch.int64, device="cuda")
    step_of(call, optimizer, tokens)
    return call, model, optimizer, tokens


def peak_of(sequence, attention, dtype, chunk_size=None):
    """(the tracker's peak of a second step, the allocator's: both with what is there at its start)."""
    call, model, optimizer, tokens = built(sequence, attention, dtype, chunk_size)
    with memory.track(model, optimizer, tokens) as t, memory.measure("cuda") as m:
        step_of(call, optimizer, tokens)
    return t.peak.total, t.start.total + m.peak


def two_steps(sequence, attention, dtype, chunk_size=None):
    call, _, optimizer, tokens = built(sequence, attention, dtype, chunk_size)
    step_of(call, optimizer, tokens)


@pytest.mark.parametrize("chunk_size", [None, 256])
@pytest.mark.parametrize(("attention", "dtype"), [
    ("dense", torch.float32), ("dense", torch.bfloat16), ("flash", torch.bfloat16)])
def test_predicted_and_measured(attention, dtype, chunk_size):
    """By the closed form where there is one, else by a dry run."""
    if attention == "flash":
        predicted = memory.dry_run(two_steps, 2048, attention, dtype, chunk_size).peak.total
    elif chunk_size:
        predicted = chunked_step_bytes(CONFIG, 2, 2048, chunk_size, dtype, device="cuda").total
    else:
        predicted = training_step_bytes(CONFIG, 2, 2048, dtype, device="cuda").total
    tracked, allocated = peak_of(2048, attention, dtype, chunk_size)
    assert abs(tracked - predicted) <= 0.02 * tracked
    assert abs(allocated - tracked) <= 0.01 * allocated


@pytest.mark.bytes
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_answer_fits_and_a_fifth_more_does_not(attention):
    budget = 3 * 2**30
    found = longest_sequence(lambda sequence: two_steps(sequence, attention, torch.bfloat16), budget, longest=2048)
    assert found.ledger.total <= budget
    if found.limit == "budget":
        assert peak_of(found.sequence, attention, torch.bfloat16)[0] <= 1.02 * budget
        assert peak_of(min(2048, int(1.2 * found.sequence)), attention, torch.bfloat16)[0] > budget
    else:
        assert peak_of(2048, attention, torch.bfloat16)[0] <= 1.02 * budget


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_chunks_give_the_whole_gradient(attention, dtype, within):
    model = GPT(CONFIG, ATTENTIONS[attention], dtype=dtype, device="cuda")
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 1000), device="cuda")
    loss = model(tokens, tokens)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    process = ChunkedSequenceProcessor(model, 300)
    in_chunks = process(tokens, tokens)
    in_chunks.backward()
    assert torch.isclose(in_chunks, loss, rtol=1e-3)
    for parameter, each in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad.double() - each.double()).norm() <= within * each.double().norm() + 1e-9
    with torch.no_grad():
        assert torch.allclose(torch.cat(list(process.logits(tokens)), 1).float(), model(tokens).float(), atol=0.05)


def test_dropout_masks_come_again():
    """Two backwards of the same random state give the same gradient, one of them in chunks that run twice."""
    model = GPT(GPTConfig(vocab_size=512, context_length=512, layers=2, hidden=128, heads=4, dropout=0.2),
                device="cuda")
    tokens = torch.randint(0, 512, (2, 512), device="cuda")
    process = ChunkedSequenceProcessor(model, 128)
    state = torch.cuda.get_rng_state()
    loss = process(tokens, tokens)
    loss.backward()
    gradient = [parameter.grad for parameter in model.parameters()]
    step, slope = 1e-3, 0.0
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, each in zip(model.parameters(), gradient, strict=True):
                parameter.add_(each, alpha=step if sign == 1 else -2 * step)
            torch.cuda.set_rng_state(state)
            slope += sign * process(tokens, tokens).double().item() / (2 * step)
    assert slope == pytest.approx(sum(each.square().sum().item() for each in gradient), rel=0.05)
