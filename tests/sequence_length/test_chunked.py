"""A sequence in chunks: the same logits, loss and gradients, the bytes of one chunk; and versions that save nothing."""

import functools

import pytest
import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.mixed_precision import autocast
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor, carried_bytes, training_step_bytes

ATTENTIONS = {"dense": softmax_attention, "flash": F.scaled_dot_product_attention}


def made(config, attention="dense", dtype=torch.float64, batch=2, length=50):
    """(model, tokens, targets): targets of a whole chunk and of parts of others are ignored."""
    torch.manual_seed(0)
    model = GPT(config, ATTENTIONS[attention], dtype=dtype)
    tokens, targets = torch.randint(0, 300, (2, batch, length))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    targets[:, 5:23] = -100
    return model, tokens, targets


def gradients(model, loss):
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def apart(found, expected):
    """The largest distance of a gradient, as a share of its norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


# --- the same result -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [7, 25, 49, 1000])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_logits_loss_and_gradients_are_those_of_the_whole(family, name, attention, chunk_size):
    model, tokens, targets = made(family(name, layers=2), attention)
    loss, logits = model(tokens, targets), model(tokens)
    expected = gradients(model, loss)
    process = ChunkedSequenceProcessor(model, chunk_size)
    in_chunks = process(tokens, targets)
    assert torch.allclose(in_chunks, loss, rtol=1e-6) and in_chunks.dtype == loss.dtype
    assert apart(gradients(model, in_chunks), expected) < 1e-6
    parts = list(process.logits(tokens))
    assert [part.shape[1] for part in parts] == [last - first for first, last in process.chunks(50)]
    assert torch.allclose(torch.cat(parts, 1), logits, atol=1e-9) and not parts[0].requires_grad
    with torch.no_grad():
        assert torch.allclose(process(tokens, targets), loss, rtol=1e-6)


def test_gradients_are_added_and_scaled_as_autograd_does(family):
    model, tokens, targets = made(family("gpt2", layers=2))
    expected = gradients(model, model(tokens, targets) * 3)
    process = ChunkedSequenceProcessor(model, 16)
    (process(tokens, targets) * 2).backward()
    assert apart(gradients(model, process(tokens, targets)), expected) < 1e-6


def test_in_low_precision_it_is_as_near_as_the_whole_pass(family):
    model, tokens, targets = made(family("llama", layers=2), dtype=torch.float32)
    exact = gradients(model, model(tokens, targets))
    low = GPT(model.config, dtype=torch.bfloat16)
    low.load_state_dict(model.state_dict())
    whole = apart(gradients(low, low(tokens, targets)), exact)
    assert apart(gradients(low, ChunkedSequenceProcessor(low, 8)(tokens, targets)), exact) < 1.5 * whole


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # llama: rotated keys are fp32, values are bf16
@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16),
                                    lambda: autocast(torch.bfloat16, "cpu")], ids=["torch's", "ours"])
def test_under_autocast_with_recomputed_blocks_and_frozen_parameters(family, name, region):
    model, tokens, targets = made(family(name, layers=2), dtype=torch.float32)
    model.embedding.requires_grad_(False)
    model.blocks[0].mlp.requires_grad_(False)
    with region():
        loss = model(tokens, targets)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with recompute(model.blocks):
        with region():
            loss = ChunkedSequenceProcessor(model, 16)(tokens, targets)
        loss.backward()  # outside of it, as one should
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and apart(found.values(), expected.values()) < 0.03


def test_dropout_is_the_same_in_the_recomputation(family):
    """The gradient of the very loss that the forward gave, by a difference of two losses with the same masks."""
    model, tokens, targets = made(family("gpt2", layers=2, dropout=0.3))
    process, generator = ChunkedSequenceProcessor(model, 16), torch.get_rng_state()

    def loss():
        torch.set_rng_state(generator)
        return process(tokens, targets)

    found = gradients(model, loss())
    step = 1e-3
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.add_(gradient, alpha=step)
        up = loss().double()
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.sub_(gradient, alpha=2 * step)
        slope = (up - loss().double()) / (2 * step)
    assert slope.item() == pytest.approx(sum(g.square().sum().item() for g in found), rel=1e-3)
    model.eval()
    assert torch.allclose(process(tokens, targets), model(tokens, targets), rtol=1e-6)


def test_random_numbers_go_on_after_a_backward_as_if_nothing_was_drawn_in_it(family):
    model, tokens, targets = made(family("gpt2", dropout=0.1))
    loss = ChunkedSequenceProcessor(model, 16)(tokens, targets)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_truncated_is_another_gradient_and_says_so(family):
    """That of a pass in which every chunk's earlier keys and values are constants."""
    model, tokens, targets = made(family("gpt2", layers=2))
    process = ChunkedSequenceProcessor(model, 25, gradient="truncated")
    assert "gradient='truncated'" in repr(process) and "ChunkedSequenceProcessor(GPT, 25" in repr(process)
    loss = process(tokens, targets)
    whole = model(tokens, targets)
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


# --- the bytes -------------------------------------------------------------------------------------------------------

PEAKS = [("gpt2", "dense", 64, {}), ("gpt2", "flash", 128, {"dtype": torch.bfloat16}),
         ("llama", "dense", 100, {"dtype": torch.bfloat16}), ("llama", "flash", 64, {"gradient": "truncated"}),
         ("neox", "flash", 96, {"recompute": True}), ("neox", "dense", 128, {"gradient": "truncated"})]


@pytest.mark.parametrize(("name", "attention", "chunk_size", "step"), PEAKS)
def test_peak_predicted_and_measured(peak, family, name, attention, chunk_size, step):
    config, step = family(name, layers=2), {"attention": attention, "chunk_size": chunk_size} | step
    predicted = training_step_bytes(config, 2, 250, **step)
    assert predicted.total == pytest.approx(peak(config, 2, 250, **step), rel=0.001)
    times = 1 if step.get("gradient") == "truncated" else 2
    assert predicted["keys and values"] == times * carried_bytes(config, 2, 250, step.get("dtype", torch.float32))


def test_the_allocator_says_the_same(family):
    """And the peak above the start falls with the chunk, down to what is carried and the gradients."""
    config = family("gpt2", layers=2)
    model, tokens, targets = made(config, "flash", torch.float32, length=512)
    model(tokens, targets).backward()
    states, peaks = training_step_bytes(config, 2, 512, optimizer="sgd"), []
    for chunk_size in (512, 256, 128, 64):
        model.zero_grad()
        with memory.measure("cpu") as m:
            ChunkedSequenceProcessor(model, chunk_size)(tokens, targets).backward()
        predicted = training_step_bytes(config, 2, 512, attention="flash", optimizer="sgd", chunk_size=chunk_size)
        above = predicted.total - states["parameters"] - states["inputs"]
        assert above == pytest.approx(m.peak, rel=0.01)
        peaks.append(m.peak)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.4 * peaks[0]


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
        self.carried.need_gradients()
        self.last.backward(gradient)

    monkeypatch.setattr(chunked._Pass, "forward", forward)
    monkeypatch.setattr(chunked._Pass, "backward", backward)


def test_versions_that_save_nothing_are_seen(family, monkeypatch):
    config = family("gpt2", layers=2, vocab_size=3000)
    states = training_step_bytes(config, 2, 400, optimizer="sgd")
    predicted = training_step_bytes(config, 2, 400, optimizer="sgd", chunk_size=50).total
    predicted -= states["parameters"] + states["inputs"]
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


# --- bad input, and what is left behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, None, True, "8"])
def test_chunks_that_are_none(family, chunk_size):
    with pytest.raises(ValueError, match="chunk_size=.*: expected an integer of at least 1, in tokens"):
        ChunkedSequenceProcessor(GPT(family("gpt2")), chunk_size)


def test_what_cannot_be_fed_in_chunks(family):
    with pytest.raises(TypeError, match=r"ChunkedSequenceProcessor\(Linear, …\): expected a refimpl.model.GPT"):
        ChunkedSequenceProcessor(torch.nn.Linear(1, 1), 8)
    with pytest.raises(ValueError, match="gradient='half': expected 'full' or 'truncated'"):
        ChunkedSequenceProcessor(GPT(family("gpt2")), 8, gradient="half")
    for attention in (lambda q, k, v: v, functools.partial(F.scaled_dot_product_attention, is_causal=True)):
        with pytest.raises(ValueError, match="takes no causal: a chunk's mask is another than the sequence's"):
            ChunkedSequenceProcessor(GPT(family("gpt2"), attention), 8)


def test_tokens_and_targets_are_checked_as_the_model_does(family):
    process = ChunkedSequenceProcessor(GPT(family("gpt2")), 8)
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    with pytest.raises(ValueError, match="the context has 1024"):
        process(*torch.zeros(2, 1, 1025, dtype=torch.int64))
    with pytest.raises(ValueError, match="the context has 1024"):
        list(process.logits(torch.zeros(1, 1025, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"targets of shape \(1, 19\) for tokens of \(1, 20\)"):
        process(tokens, tokens[:, 1:])
    with pytest.raises(TypeError, match="tokens as a list"):
        process([[1]], tokens)
    with pytest.raises(ValueError, match="targets run from 0 to 300: the vocabulary is 0…299"):
        process(tokens, tokens.index_fill(1, torch.tensor([13]), 300))


def test_every_target_ignored_is_nan_as_in_the_whole_pass(family):
    model, tokens, targets = made(family("gpt2", layers=1))
    targets.fill_(-100)
    assert model(tokens, targets).isnan() and ChunkedSequenceProcessor(model, 20)(tokens, targets).isnan()


def test_a_backward_that_fails_leaves_no_half_sum(family):
    model, tokens, targets = made(family("gpt2", layers=2))
    process = ChunkedSequenceProcessor(model, 10)
    process(tokens, targets).backward()
    loss, calls = process(tokens, targets), []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1) or (1 / 0 if len(calls) == 2 else None))
    attentions = [block.attention.attention for block in model.blocks]
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [block.attention.attention for block in model.blocks] == attentions == [softmax_attention] * 2


def test_what_autograd_cannot_have(family):
    model, tokens, targets = made(family("gpt2", layers=1))
    process = ChunkedSequenceProcessor(model, 10)
    with pytest.raises(RuntimeError, match=r"adds gradients to .grad: call loss.backward\(\) without inputs="):
        torch.autograd.grad(process(tokens, targets), list(model.parameters()), allow_unused=True)
    loss = process(tokens, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward a second time through a loss of ChunkedSequenceProcessor"):
        loss.backward()
    model.requires_grad_(False)
    assert not process(tokens, targets).requires_grad
