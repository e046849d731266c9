"""A sequence in chunks: the same logits, loss and gradients, the bytes of one chunk; and versions that save nothing."""

import pytest
import torch
from torch.nn import functional as F
from training_step import ATTENTIONS

from refimpl import memory
from refimpl.attention import MaskedAttention, causal_mask, longformer_mask, sparse
from refimpl.checkpointing import recompute
from refimpl.mixed_precision import autocast
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor, carried_bytes, chunked_step_bytes

PEAKS = [  # bytes where the closed form has no say, counted operation by operation
    ("gpt2", "dense", 64, {}, None), ("gpt2", "flash", 128, {"dtype": torch.bfloat16}, 4_048_824),
    ("llama", "dense", 100, {"dtype": torch.bfloat16}, None),
    ("llama", "flash", 64, {"gradient": "truncated"}, 4_226_444),
    ("neox", "flash", 96, {"recompute": True}, 4_379_576),
    ("neox", "dense", 128, {"gradient": "truncated"}, 7_573_536)]


def gradients(model, loss):
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def apart(found, expected):
    """The largest distance of a gradient, as a share of its norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "attention", "chunk_size"), [
    *((name, attention, 7) for name in ("gpt2", "llama", "neox") for attention in ATTENTIONS),  # the last has one token
    ("gpt2", "dense", 25), ("llama", "flash", 49), ("neox", "dense", 1000)])
def test_logits_loss_and_gradients_are_those_of_the_whole(made, family, name, attention, chunk_size):
    model, tokens, targets = made(family(name, layers=2), attention)
    loss, logits = model(tokens, targets), model(tokens)
    expected, process = gradients(model, loss), ChunkedSequenceProcessor(model, chunk_size)
    in_chunks = process(tokens, targets)
    assert torch.allclose(in_chunks, loss, rtol=1e-6) and in_chunks.dtype == loss.dtype
    assert apart(gradients(model, in_chunks), expected) < 1e-6
    parts = list(process.logits(tokens))
    assert [part.shape[1] for part in parts] == [last - first for first, last in process.chunks(50)]
    assert torch.allclose(torch.cat(parts, 1), logits, atol=1e-9) and not parts[0].requires_grad
    with torch.no_grad():
        assert torch.allclose(process(tokens, targets), loss, rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [32, 40, 64])  # 40: chunks that begin within a block
def test_a_mask_of_blocks_is_that_of_the_whole_sequence(made, family, chunk_size):
    model, _, _ = made(family("llama", layers=2, context_length=200))
    tokens, targets = torch.randint(64, (2, 2, 200), generator=torch.Generator().manual_seed(0))
    full = model(tokens, targets).item()
    sparse(model, lambda T: longformer_mask(T, 20, {0, 70}, block=32))
    loss = model(tokens, targets)
    expected, process = gradients(model, loss), ChunkedSequenceProcessor(model, chunk_size)
    in_chunks = process(tokens, targets)
    assert torch.allclose(in_chunks, loss, rtol=1e-6) and abs(loss.item() - full) > 1e-6
    assert apart(gradients(model, in_chunks), expected) < 1e-6
    model.blocks[0].attention.set_attention(MaskedAttention(lambda T: causal_mask(T, block=32)))  # is said to be none
    with pytest.raises(ValueError, match="has no option causal"):
        ChunkedSequenceProcessor(model, 32)


def test_gradients_are_added_and_scaled_as_autograd_does(made, family):
    model, tokens, targets = made(family("gpt2", layers=2))
    expected, process = gradients(model, model(tokens, targets) * 3), ChunkedSequenceProcessor(model, 16)
    (process(tokens, targets) * 2).backward()
    assert apart(gradients(model, process(tokens, targets)), expected) < 1e-6


def test_in_low_precision_it_is_as_near_as_the_whole_pass(made, family):
    model, tokens, targets = made(family("llama", layers=2), dtype=torch.float32)
    exact, low = gradients(model, model(tokens, targets)), GPT(model.config, dtype=torch.bfloat16)
    low.load_state_dict(model.state_dict())
    whole = apart(gradients(low, low(tokens, targets)), exact)
    assert apart(gradients(low, ChunkedSequenceProcessor(low, 8)(tokens, targets)), exact) < 1.5 * whole


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # llama: rotated keys are fp32, values are bf16
@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16),
                                    lambda: autocast(torch.bfloat16, "cpu")], ids=["torch's", "ours"])
def test_under_autocast_with_recomputed_blocks_and_frozen_parameters(made, family, name, region):
    model, *batch = made(family(name, layers=2), dtype=torch.float32)
    model.embedding.requires_grad_(False)
    model.blocks[0].mlp.requires_grad_(False)
    def step(call):
        with region():
            loss = call(*batch)
        return gradients(model, loss)  # outside of it, as one should

    whole = step(model)
    with recompute(model.blocks):
        in_chunks = step(ChunkedSequenceProcessor(model, 16))
    found, expected = ([x for x in each if x is not None] for each in (in_chunks, whole))
    assert [x is None for x in in_chunks] == [x is None for x in whole] and apart(found, expected) < 0.03


def test_dropout_is_the_same_in_the_recomputation(made, family):
    """The gradient of the very loss that the forward gave, by a difference of two losses with the same masks."""
    model, tokens, targets = made(family("gpt2", layers=2, dropout=0.3))
    process, generator = ChunkedSequenceProcessor(model, 16), torch.get_rng_state()
    def loss():
        torch.set_rng_state(generator)
        return process(tokens, targets)

    found, losses = gradients(model, loss()), []
    with torch.no_grad():
        for step in (1e-3, -2e-3):
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.add_(gradient, alpha=step)
            losses.append(loss().double())
    slope = (losses[0] - losses[1]) / 2e-3
    assert slope.item() == pytest.approx(sum(g.square().sum().item() for g in found), rel=1e-3)
    model.eval()
    assert torch.allclose(process(tokens, targets), model(tokens, targets), rtol=1e-6)


def test_random_numbers_go_on_after_a_backward_as_if_nothing_was_drawn_in_it(made, family):
    model, tokens, targets = made(family("gpt2", dropout=0.1))
    loss = ChunkedSequenceProcessor(model, 16)(tokens, targets)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_truncated_is_another_gradient_and_says_so(made, family):
    """That of a pass in which every chunk's earlier keys and values are constants."""
    model, tokens, targets = made(family("gpt2", layers=2))
    process = ChunkedSequenceProcessor(model, 25, gradient="truncated")
    assert "gradient='truncated'" in repr(process) and "ChunkedSequenceProcessor(GPT, 25" in repr(process)
    loss, whole = process(tokens, targets), model(tokens, targets)
    assert torch.allclose(loss, whole, rtol=1e-6)
    def cut(q, k, v, causal):  # of the whole sequence: the second chunk's queries see the first chunk's keys detached
        first = softmax_attention(q[:, :, :25], k[:, :, :25], v[:, :, :25], causal=True)
        k, v = (torch.cat((x[:, :, :25].detach(), x[:, :, 25:]), 2) for x in (k, v))
        return torch.cat((first, softmax_attention(q[:, :, 25:], k, v, causal=True)), 2)

    reference = GPT(model.config, cut, dtype=torch.float64)
    reference.load_state_dict(model.state_dict())
    expected = gradients(reference, reference(tokens, targets))
    found = gradients(model, loss)
    assert apart(found, expected) < 1e-6 and apart(found, gradients(model, whole)) > 1e-3


def test_compiled_blocks_get_the_whole_gradient(made, family):
    """A trace would take the sums of later chunks, which are not there in forward, for never there."""
    model, tokens, targets = made(family("gpt2", layers=1, hidden=16, vocab_size=300))
    expected = gradients(model, model(tokens, targets))
    for block in model.blocks:
        block.compile(backend="eager")
    assert apart(gradients(model, ChunkedSequenceProcessor(model, 20)(tokens, targets)), expected) < 1e-6


@pytest.mark.parametrize(("name", "attention", "chunk_size", "step", "predicted"), PEAKS)
def test_peak_predicted_and_measured(trace, family, name, attention, chunk_size, step, predicted):
    config, dtype = family(name, layers=2), step.get("dtype", torch.float32)
    predicted = predicted or chunked_step_bytes(config, 2, 250, chunk_size, dtype).total
    peak = trace(config, 2, 250, attention=attention, chunk_size=chunk_size, **step).peak
    assert predicted == pytest.approx(peak.total, rel=0.001)
    times = 1 if step.get("gradient") == "truncated" else 2
    assert peak["keys and values"] == times * carried_bytes(config, 2, 250, dtype)


def test_the_allocator_says_the_same(made, family):
    """And the peak above the start falls with the chunk, down to what is carried and the gradients."""
    model, tokens, targets = made(family("gpt2", layers=2), "flash", torch.float32, length=512)
    model(tokens, targets).backward()
    peaks = []
    for chunk_size in (512, 256, 128, 64):
        model.zero_grad()
        dry = memory.dry_run(lambda *args, size=chunk_size: chunked_backward(size, *args), model, tokens, targets)
        with memory.measure("cpu") as m:
            chunked_backward(chunk_size, model, tokens, targets)
        assert dry.peak.total - dry.start.total == pytest.approx(m.peak, rel=0.01)
        peaks.append(m.peak)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.4 * peaks[0]


def chunked_backward(chunk_size, model, tokens, targets):
    ChunkedSequenceProcessor(model, chunk_size)(tokens, targets).backward()


def read(config, call):
    """Peak above the start of `call(model, tokens, targets)` and its backward, on fake tensors."""
    model, tokens = GPT(config), torch.zeros(2, 400, dtype=torch.int64)
    t = memory.dry_run(lambda model, tokens: call(model, tokens, tokens).backward(), model, tokens)
    return t.peak.total - t.start.total


def in_chunks(model, tokens, targets, **options):
    return ChunkedSequenceProcessor(model, 50, **options)(tokens, targets)


def with_whole_logits(model, tokens, targets):
    """The mutant that keeps a list of logits, and takes the loss at the end."""
    logits = torch.cat(list(ChunkedSequenceProcessor(model, 50).logits(tokens)), 1).requires_grad_()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_every_graph(monkeypatch):
    """The mutant whose chunks all keep their graphs until the backward."""
    from refimpl.sequence_length import chunked
    def forward(self):
        with torch.enable_grad():
            self.last = sum(self._loss(first, last, store=True) for first, last in self.chunks)
        return self.last.detach()

    def backward(self, gradient):
        self.carried.allocate_gradients()
        self.last.backward(gradient)

    monkeypatch.setattr(chunked._ChunkedPass, "forward", forward)
    monkeypatch.setattr(chunked._ChunkedPass, "backward", backward)


def test_versions_that_save_nothing_are_seen(family, monkeypatch):
    config = family("gpt2", layers=2, vocab_size=3000)
    predicted = chunked_step_bytes(config, 2, 400, 50, optimizer="sgd")
    predicted = predicted.total - predicted["parameters"] - predicted["inputs"]
    assert read(config, in_chunks) == pytest.approx(predicted, rel=0.01)
    assert read(config, lambda model, *batch: model(*batch)) > 2 * predicted
    assert read(config, with_whole_logits) > 1.5 * predicted
    with_every_graph(monkeypatch)
    assert read(config, in_chunks) > 1.5 * predicted


def test_logits_never_exist_whole(family):
    model, tokens = GPT(family("llama", layers=1, vocab_size=5000)), torch.zeros(1, 400, dtype=torch.int64)
    process = ChunkedSequenceProcessor(model, 40)
    one_chunk, whole = 4 * 40 * 5000, 4 * 400 * 5000
    with memory.track(model, tokens) as t:
        for logits in process.logits(tokens):
            del logits
    assert one_chunk < t.peak.total - t.start.total < 1.8 * one_chunk
    with torch.no_grad(), memory.track(model, tokens) as t:
        process(tokens, tokens)
    assert t.peak["activations"] == 0 and t.now["temporaries"] == 0
    with memory.track(model, tokens) as t:
        process(tokens, tokens).backward()
    assert t.peak.total - t.start.total - t.now["gradients"] < 5 * one_chunk < whole


def test_a_hook_of_a_parameter_hears_each_chunk_once(made, family):
    model, tokens, targets = made(family("gpt2", layers=1), "dense")
    heard, parameter = [], next(model.parameters())
    parameter.register_hook(heard.append)
    ChunkedSequenceProcessor(model, 25)(tokens, targets).backward()
    assert len(heard) == -(-tokens.shape[1] // 25)
