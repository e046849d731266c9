"""Compression and offload on a CUDA device: bytes on it, gradients, and copies beside the computation."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.activations import (
    compress_activations,
    compressed_activation_bytes,
    offload_activations,
    offloaded_activation_bytes,
)
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=256, layers=4, hidden=256, heads=4)
DROPOUT = GPTConfig(**{**vars(CONFIG), "dropout": 0.1})
METHODS = ["lossless", "bf16", "int8"]
pytestmark = pytest.mark.usefixtures("deterministic", "clean")  # what an earlier test left would be freed in a reading


def model_and_tokens(config=CONFIG, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return GPT(config, dtype=dtype, device="cuda", **options), torch.randint(0, 256, (4, 256), device="cuda")


def gradients(model, tokens, context):
    torch.manual_seed(1)
    with context:
        loss = model(tokens, tokens)
    return torch.autograd.grad(loss, list(model.parameters()))


def wait_for_autograd():
    """Until bytes stand still: autograd's own thread frees the last gradients after its caller went on."""
    before = None
    while (now := torch.cuda.memory_allocated()) != before:
        before = now
        time.sleep(0.05)


def kept(model, tokens, context):
    """(tracker's activations on the device after the forward, the allocator's net, the context)."""
    gradients(model, tokens, torch.enable_grad())  # workspaces are there
    wait_for_autograd()
    with memory.measure("cuda") as m, memory.track(model, tokens) as t:
        with context as c:
            loss = model(tokens, tokens)
        torch.cuda.synchronize()
    assert loss.isfinite()
    return t, m.net - loss.nbytes, c


# --- compression ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, DROPOUT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_compressed_bytes_are_exact(config, dtype, method):
    model, tokens = model_and_tokens(config, dtype)
    t, net, c = kept(model, tokens, compress_activations(model, method))
    predicted = compressed_activation_bytes(config, 4, 256, method, dtype=dtype, device="cuda")
    assert predicted == t.now["activations"] == c.report.after.total
    assert net == pytest.approx(predicted, abs=64 * config.layers)


@pytest.mark.parametrize("attention", ["dense", "fused"])
def test_lossless_gradients_are_bit_equal(attention):
    options = {} if attention == "dense" else {"attention": F.scaled_dot_product_attention}
    model, tokens = model_and_tokens(DROPOUT, **options)
    expected = gradients(model, tokens, torch.enable_grad())
    context = compress_activations(model, "lossless", smallest=0)
    assert all(map(torch.equal, gradients(model, tokens, context), expected))
    assert context.report.before["masks, 1 bit"] > 0


@pytest.mark.parametrize("attention", ["dense", "fused"])
@pytest.mark.parametrize("options", [{"method": "bf16"}, {"method": "int8"}, {"stochastic": True}])
def test_rounded_gradients_are_near(attention, options):
    kwargs = {} if attention == "dense" else {"attention": F.scaled_dot_product_attention}
    model, tokens = model_and_tokens(**kwargs)
    expected = gradients(model, tokens, torch.enable_grad())
    found = gradients(model, tokens, compress_activations(model, **options))
    off = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True))
    assert 0 < (off / sum(b.square().sum() for b in expected)).sqrt() < 0.1


def test_the_device_numbers_of_the_user_are_not_touched():
    model, tokens = model_and_tokens()
    torch.manual_seed(1)
    before = torch.cuda.get_rng_state()
    with compress_activations(model, stochastic=True):
        model(tokens, tokens).backward()
    assert torch.equal(before, torch.cuda.get_rng_state())


# --- offload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, DROPOUT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_offloaded_gradients_are_bit_equal(config, dtype, depth):
    model, tokens = model_and_tokens(config, dtype)
    expected = gradients(model, tokens, torch.enable_grad())
    for _ in range(3):  # memory that was given back too early is somebody else's by now
        context = offload_activations(model, depth=depth, smallest=0)
        assert all(map(torch.equal, gradients(model, tokens, context), expected))


@pytest.mark.bytes
@pytest.mark.parametrize("smallest", [0, 2**16, 2**20])
def test_offloaded_bytes_are_exact(smallest):
    model, tokens = model_and_tokens()
    t, net, c = kept(model, tokens, offload_activations(model, smallest=smallest))
    device, host = offloaded_activation_bytes(CONFIG, 4, 256, smallest=smallest)
    assert t.now["activations"] == c.report.after.total == device
    assert t.on("cpu").now["activations"] == c.report.host == host
    assert net == pytest.approx(device, abs=64 * CONFIG.layers)
    assert host + device == memory.activation_bytes(CONFIG, 4, 256, device="cuda")


@pytest.mark.bytes
def test_the_host_copies_are_pinned():
    x = torch.randn(2**19, device="cuda", requires_grad=True)
    with offload_activations(nn.Linear(1, 1)) as c:
        y = (x * 1).sin()
    (stored,) = c.report._stored
    assert stored.host.is_pinned() and y.requires_grad


@pytest.mark.bytes
def test_the_peak_falls():
    model, tokens = model_and_tokens(GPTConfig(**{**vars(CONFIG), "layers": 12}))
    model(tokens, tokens).backward()
    peaks = []
    for context in (torch.enable_grad(), offload_activations(model, smallest=2**16)):
        with memory.measure("cuda") as m:
            with context:
                loss = model(tokens, tokens)
            loss.backward()
            del loss
        peaks.append(m.peak)
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.alone
def test_copies_run_beside_the_computation(seconds):
    """A forward that computes for long and saves little for that: with offload it takes hardly longer, although the
    copies by themselves take a good part of it."""
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    weights = [torch.randn(4096, 4096, device="cuda") / 64 for _ in range(4)]

    def forward():
        y = x * 1
        for _ in range(8):
            y = y.sin()  # saves 64 MiB
            with torch.no_grad():
                z = y
                for _ in range(6):
                    for weight in weights:
                        z = z @ weight  # about 3 ms each in fp32
        return y.sum()

    def run(context, backward=False):
        with context:
            loss = forward()
        if backward:
            loss.backward()
        return loss

    model = nn.Linear(1, 1)
    for context in (torch.enable_grad(), offload_activations(model)):
        run(context, backward=True)
    plain = min(seconds(partial(run, torch.enable_grad())) for _ in range(5))
    offloaded = min(seconds(partial(run, offload_activations(model))) for _ in range(5))
    assert offloaded < 1.25 * plain


def test_what_is_changed_in_place_on_its_way_is_refused():
    x = torch.randn(2**20, device="cuda", requires_grad=True)
    with offload_activations(nn.Linear(1, 1), depth=4):
        y = x * 1
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation while it was copied"):
        z.sum().backward()
