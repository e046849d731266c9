"""Bytes of compressed and offloaded activations: closed form, report, tracker and allocator."""

from contextlib import nullcontext
from dataclasses import replace

import families
import pytest
import torch

from refimpl import memory
from refimpl.activations import compress_activations, offload_activations, saved_storages
from refimpl.activations.closed_forms import compressed_activation_bytes as compressed_bytes
from refimpl.activations.closed_forms import compressed_activation_terms, offloaded_activation_bytes
from refimpl.activations.compress import Compressed
from refimpl.model import GPT, GPTConfig

GPT2 = GPTConfig(vocab_size=256, context_length=128, layers=2, hidden=64, heads=4)
LLAMA, NEOX = replace(GPT2, **families.LLAMA, mlp_hidden=176), replace(GPT2, **families.NEOX)
METHODS = ["lossless", "bf16", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPE = 3, 67  # odd numbers: short groups and bytes that are not full


def kept(config, dtype, context):
    """(tracker's activations after the forward, the context) of a GPT whose forward ran in `context(model)`."""
    model, tokens = GPT(config, dtype=dtype), torch.randint(0, 256, SHAPE)
    with memory.track(model, tokens) as t:
        with context(model) as c:
            loss = model(tokens, tokens)
    assert loss.isfinite()
    return t.now["activations"], c


@pytest.mark.parametrize("config", [GPT2, LLAMA, NEOX], ids=["gpt2", "llama", "neox"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_storages_are_those_of_activation_bytes(config, dtype, dropout):
    config = replace(config, dropout=dropout)
    for device in ("cpu", "cuda"):
        total = sum(each.count * each.nbytes for each in saved_storages(config, *SHAPE, dtype, device))
        assert total == memory.activation_bytes(config, *SHAPE, dtype, device)


@pytest.mark.parametrize("config", [GPT2, LLAMA, NEOX], ids=["gpt2", "llama", "neox"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_compressed_bytes_are_exact(config, dtype, dropout, method):
    config = replace(config, dropout=dropout)
    for smallest, group in ((0, 100), (4096, 128), (60_000, 7)):
        predicted = compressed_bytes(config, *SHAPE, method, group=group, smallest=smallest, dtype=dtype)
        tracked, context = kept(config, dtype, lambda model: compress_activations(
            model, method, group=group, smallest=smallest))  # noqa: B023
        assert predicted == tracked == context.report.after.total
        assert context.report.before.total == memory.activation_bytes(config, *SHAPE, dtype)


def test_each_method_saves_what_its_name_says():
    plain = memory.activation_bytes(GPT2, *SHAPE)
    lossless, bf16, int8 = (compressed_bytes(GPT2, *SHAPE, method, smallest=0) / plain for method in METHODS)
    assert 0.99 < lossless < 1, "one mask in each block"
    assert 0.49 < bf16 < 0.51 and 0.26 < int8 < 0.28
    dropout = replace(GPT2, dropout=0.1)
    assert 0.80 < compressed_bytes(dropout, *SHAPE, "lossless") / memory.activation_bytes(dropout, *SHAPE) < 0.82


def test_the_equation_written_out():
    """One block by hand: s sequence, b batch, h hidden, a heads, f MLP, g elements in a group."""
    s, b, h, a, f, g = 64, 2, 64, 4, 256, 128
    terms = compressed_activation_terms(GPT2, b, s, "int8", smallest=0)
    elements = {"norm inputs": 5 * s * b * h, "GELU input": 2 * s * b * f, "softmax output": 2 * a * b * s * s,
                "log-probabilities": s * b * 256}
    for name, n in elements.items():
        assert terms[name] == n + 8 * n // g
    assert terms["causal mask"] == 2 * s * s // 8
    assert terms["norm statistics"] == 5 * 2 * 4 * s * b and terms["positions"] == 8 * s


def test_cuda_keeps_boolean_masks_and_fewer_bytes_of_them():
    config = replace(GPT2, dropout=0.1)
    on_cpu, on_cuda = (compressed_activation_terms(config, 2, 64, "lossless", smallest=0, device=device)
                       for device in ("cpu", "cuda"))
    for name in ("softmax dropout mask", "MLP dropout mask", "attention dropout mask"):
        assert on_cpu[name] == on_cuda[name] + 2 * 8, "both values of the noise, in each of two blocks"


def test_the_allocator_says_the_same():
    """To the byte: besides activations there is the loss, which the caller holds, and the number 1/√D that each block
    multiplies its queries with, a float64 that is a Python number to the tracker."""
    model, tokens = GPT(GPT2), torch.randint(0, 256, SHAPE)
    for context in (nullcontext(), *(compress_activations(model, method) for method in METHODS)):
        with memory.measure("cpu") as m, context:
            loss = model(tokens, tokens)
        activations = memory.activation_bytes(GPT2, *SHAPE) if isinstance(context, nullcontext) else (
            compressed_bytes(GPT2, *SHAPE, context.method))
        assert m.net == activations + loss.nbytes + 8 * GPT2.layers
        del loss


def test_a_version_that_keeps_the_originals_is_seen(monkeypatch):
    """The mutant: codes are made, and what they are codes of is held beside them."""
    right, _ = kept(GPT2, torch.float32, compress_activations)
    create = Compressed.__init__
    monkeypatch.setattr(Compressed, "__init__",
                        lambda self, tensor, code: setattr(self, "too", tensor.detach()) or create(self, tensor, code))
    wrong, context = kept(GPT2, torch.float32, compress_activations)
    assert right == compressed_bytes(GPT2, *SHAPE) < wrong - 0.9 * memory.activation_bytes(GPT2, *SHAPE)
    assert context.report.after.total == right, "the report is what was meant; the tracker is what is"


@pytest.mark.parametrize("config", [GPT2, LLAMA, NEOX], ids=["gpt2", "llama", "neox"])
@pytest.mark.parametrize("smallest", [0, 1000, 20_000, 60_000])  # 1000: a norm keeps two times 804 bytes of statistics
def test_offloaded_bytes_are_exact(config, smallest, lazy):
    """On a device of which the tests pretend that it is not the host: what the report says stays, and what goes."""
    _, context = kept(config, torch.float32, lambda it: offload_activations(it, smallest=smallest, transfer=lazy))
    device = sum(s.count * s.nbytes for s in saved_storages(config, *SHAPE) if s.nbytes < smallest)
    assert context.report.after.total == device
    assert context.report.host == memory.activation_bytes(config, *SHAPE) - device
    on_cuda = offloaded_activation_bytes(config, *SHAPE, smallest=smallest)
    assert sum(on_cuda) == memory.activation_bytes(config, *SHAPE, device="cuda")


def test_offload_on_a_cpu_costs_no_bytes():
    tracked, context = kept(GPT2, torch.float32, lambda model: offload_activations(model, smallest=0))
    assert (tracked, 0) == offloaded_activation_bytes(GPT2, *SHAPE, smallest=0, device="cpu")
    assert tracked == memory.activation_bytes(GPT2, *SHAPE) == context.report.after.total and context.report.host == 0


def test_a_method_that_is_not_there():
    with pytest.raises(ValueError, match="method='int4': expected 'lossless', 'bf16', 'int8'"):
        compressed_bytes(GPT2, 2, 64, "int4")
    with pytest.raises(ValueError, match="group=0: expected an integer of at least 1, the values"):
        compressed_bytes(GPT2, 2, 64, group=0)
