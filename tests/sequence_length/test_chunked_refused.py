"""A sequence in chunks: bad input, what autograd cannot have, hooks, and what is left behind."""

import functools

import pytest
import torch
from torch.nn import functional as F

from refimpl.accumulation import accumulate
from refimpl.model import GPT, softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor


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
        with pytest.raises(ValueError, match="has no option causal: a chunk has more keys than queries"):
            ChunkedSequenceProcessor(GPT(family("gpt2"), attention), 8)


def test_tokens_and_targets_are_checked_as_the_model_does(family):
    process = ChunkedSequenceProcessor(GPT(family("gpt2")), 8)
    tokens, long = (torch.zeros(1, length, dtype=torch.int64) for length in (20, 1025))
    outside = tokens.index_fill(1, torch.tensor([13]), 300)
    for batch, error, words in (
            ((long, long), ValueError, "the context has 1024"), (([[1]], tokens), TypeError, "tokens as a list"),
            ((tokens, tokens[:, 1:]), ValueError, r"targets of shape \(1, 19\) for tokens of \(1, 20\)"),
            ((tokens, outside), ValueError, "targets run from 0 to 300: the vocabulary is 0…299")):
        with pytest.raises(error, match=words):
            process(*batch)
    with pytest.raises(ValueError, match="the context has 1024"):
        list(process.logits(long))


def test_every_target_ignored_is_nan_as_in_the_whole_pass(made, family):
    model, tokens, targets = made(family("gpt2", layers=1))
    targets.fill_(-100)
    assert model(tokens, targets).isnan() and ChunkedSequenceProcessor(model, 20)(tokens, targets).isnan()


def test_a_backward_that_fails_leaves_no_half_sum(made, family):
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


def test_what_autograd_cannot_have(made, family):
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


def test_a_model_that_is_not_as_it_was_is_refused(made, family):
    """Also where autograd would say nothing, as it keeps no bias and copies what it cuts of the targets."""
    model, tokens, targets = made(family("gpt2", layers=1, tied=False, dropout=0.1))
    tokens, targets = tokens.clone(), targets.clone()  # each with a count of writes of its own
    process = ChunkedSequenceProcessor(model, 20)
    for change, message in ((lambda: model.blocks[0].mlp.up.bias.detach().add_(1), "changed in place"),
                            (lambda: targets.zero_(), "changed in place"), (model.eval, "eval")):
        loss = process(tokens, targets)
        change()
        with pytest.raises(RuntimeError, match=f"{message}.* between a forward of Chunked.* and the end of"):
            loss.backward()
    for parameter in model.parameters():  # an optimizer in backward: each chunk would run with other weights
        parameter.register_post_accumulate_grad_hook(lambda p: p.detach().sub_(p.grad) is None or None)
    with pytest.raises(RuntimeError, match="by an optimizer that steps in backward"):
        process(tokens, targets).backward()


@pytest.mark.parametrize("hooked", [["embedding.weight"], None])
def test_hooks_see_gradients_once_for_each_chunk(made, family, hooked):
    model, tokens, targets = made(family("gpt2", layers=1))
    seen = {name: [] for name, _ in model.named_parameters() if hooked is None or name in hooked}
    for name in seen:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda gradient, name=name: seen[name].append(gradient.shape))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.shape))
    ChunkedSequenceProcessor(model, 20)(tokens, targets).backward()
    assert all(shapes == [model.get_parameter(name).shape] * 6 for name, shapes in seen.items())


def test_accumulated_in_fp32(made, family):
    """Hooks of gradient accumulation take each chunk's share away."""
    model, tokens, targets = made(family("gpt2", layers=1), dtype=torch.bfloat16)
    in_chunks = ChunkedSequenceProcessor(model, 20)
    losses = [accumulate(model, tokens, targets, micro_batch=1),
              accumulate(model, tokens, targets, micro_batch=1, loss_fn=lambda _, *part: in_chunks(*part))]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.01)


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph: torch's own advice
def test_what_a_loss_in_chunks_has_not(made, family):
    model, tokens, targets = made(family("gpt2", layers=1))
    process = ChunkedSequenceProcessor(model, 10)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        process(tokens, targets).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="without inputs="):
        process(tokens, targets).backward(inputs=[model.norm.weight])
    with pytest.raises(TypeError, match=r"targets=None: .* process.logits\(tokens\)"):
        process(tokens, None)
    model.blocks.append(model.blocks[0])
    with pytest.raises(ValueError, match="several blocks of this model share one attention"):
        ChunkedSequenceProcessor(model, 10)
