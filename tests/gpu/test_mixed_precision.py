"""Mixed precision on a CUDA device, beside torch.autocast("cuda") and GradScaler."""

import pytest
import torch
from precision_kit import CONFIGS, SHAPE, recorded
from torch.nn import functional as F

from benchmarks import precision
from benchmarks.meter import Size
from refimpl import memory
from refimpl.mixed_precision import (
    AdaptiveLossScaler,
    MixedPrecisionOptimizer,
    autocast,
    autocast_activation_bytes,
    weight_cast_bytes,
)
from refimpl.mixed_precision.internals import lists
from refimpl.model import GPT, GPTConfig

SIZE = Size(layers=4, hidden=1024, heads=16, vocab_size=8192, batch=4, sequence=512)
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(params=CONFIGS)
def gpt(request):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**CONFIGS[request.param]), device="cuda")
    return model, torch.randint(0, 256, (2, 32), device="cuda")


@pytest.mark.parametrize("dtype", LOW)
def test_every_operation_of_our_gpt_has_the_dtype_that_torch_gives_it(gpt, dtype):
    theirs, loss, gradients = recorded(torch.autocast("cuda", dtype), *gpt)
    ours, our_loss, our_gradients = recorded(autocast(dtype), *gpt)
    assert ours.forward == theirs.forward and ours.casts == theirs.casts and ours.saved == theirs.saved
    assert torch.equal(our_loss, loss)
    for one, other in zip(our_gradients, gradients, strict=True):
        assert one.dtype is other.dtype is torch.float32 and torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("dtype", LOW)
def test_results_of_single_operations_have_torch_s_dtypes(dtype):
    x = torch.rand(4, 4, device="cuda") + 0.5
    h = x.to(dtype)
    cases = [lambda: x @ h, lambda: F.linear(x, h), lambda: h.exp(), lambda: h.log(), lambda: h**2, lambda: h.sum(),
             lambda: h.sum(0), lambda: h.softmax(-1), lambda: h.log_softmax(-1), lambda: h.cumsum(0), lambda: h.prod(),
             lambda: h.norm(), lambda: torch.norm(h, p=2, dim=1), lambda: torch.linalg.vector_norm(h),
             lambda: F.layer_norm(h, (4,)), lambda: F.group_norm(h, 2), lambda: F.mse_loss(h, x), lambda: F.gelu(h),
             lambda: torch.addcmul(h, h, x), lambda: torch.dot(h[0], x[0]), lambda: torch.atan2(h, h), lambda: h + x,
             lambda: torch.einsum("ij,jk->ik", h, x), lambda: F.softplus(h), lambda: torch.cdist(h, x),
             lambda: F.scaled_dot_product_attention(*[x[None, None]] * 3), lambda: x.double() @ x.double()]
    if torch.__version__ >= (2, 12):  # before, torch's autocast on CUDA did not know this one, and ours does
        cases.append(lambda: F.rms_norm(h, (4,)))
    for index, case in enumerate(cases):
        with torch.autocast("cuda", dtype):
            theirs = case()
        with autocast(dtype):
            ours = case()
        assert ours.dtype is theirs.dtype, index
    assert len(lists.POLICIES["cuda"]) > 100


def test_tensors_of_the_cpu_are_left_alone_and_both_regions_can_be_open():
    x, y = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    with autocast(torch.float16, "cuda"):
        assert (x @ x).dtype is torch.float32 and (y @ y).dtype is torch.float16
        with autocast(torch.bfloat16, "cpu"):
            assert (x @ x).dtype is torch.bfloat16 and (y @ y).dtype is torch.float16


@pytest.mark.bytes
@pytest.mark.parametrize("dtype", LOW)
def test_the_closed_forms_are_what_is_kept(gpt, dtype):
    model, tokens = gpt
    with memory.track(model, tokens) as t:
        with autocast(dtype):
            loss = model(tokens, tokens)
    assert loss.isfinite()
    assert t.now["activations"] == autocast_activation_bytes(model.config, 2, 32, dtype, "cuda")
    with torch.no_grad(), memory.track(model, tokens) as t, autocast(dtype):
        model(tokens, tokens)
        assert t.now.total - t.start.total == weight_cast_bytes(model.config, dtype)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_and_backward_threads_are_in_the_region(use_reentrant):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE), device="cuda")
    x, gradients = torch.randn(2, 32, 32, device="cuda", requires_grad=True), []
    for checkpointed in (False, True):
        model.zero_grad()
        with autocast():
            y = (torch.utils.checkpoint.checkpoint(model.blocks[0], x, use_reentrant=use_reentrant) if checkpointed
                 else model.blocks[0](x))
        y.float().sum().backward()
        gradients.append([p.grad.clone() for p in model.blocks[0].parameters()])
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(*gradients, strict=True))
    model.zero_grad()
    with autocast():  # backward inside: autograd's own thread inherits the region
        model.blocks[0](x).float().sum().backward()


def test_a_step_waits_for_the_device_once():
    """PyTorch itself raises where an operation waits: once, and it is the scaler's question."""
    model = GPT(GPTConfig(**SHAPE), device="cuda")
    optimizer, scaler = torch.optim.AdamW(model.parameters()), AdaptiveLossScaler()
    tokens = torch.randint(0, 256, (2, 32), device="cuda")
    with autocast(torch.float16):
        loss = model(tokens, tokens)
    scaler.scale(loss).backward()
    asked = []
    original = scaler._ask

    def ask(found):
        asked.append(isinstance(found, torch.Tensor))
        torch.cuda.set_sync_debug_mode("default")
        answer = original(found)
        torch.cuda.set_sync_debug_mode("error")
        return answer

    scaler._ask = ask
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaler.step(optimizer)
        scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(asked) == 1


def test_gradients_on_several_devices():
    there, here = torch.nn.Parameter(torch.ones(2, device="cuda")), torch.nn.Parameter(torch.ones(2))
    for bad in (None, there, here):
        optimizer, scaler = torch.optim.SGD([there, here], lr=0.0), AdaptiveLossScaler(8.0)
        optimizer.zero_grad()
        scaler.scale(there.sum().cpu() + here.sum()).backward()
        if bad is not None:
            bad.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == (bad is not None)


@pytest.mark.bytes
@pytest.mark.parametrize("fp32_gradients", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_sixteen_and_eighteen_bytes_a_parameter(dtype, fp32_gradients):
    model = GPT(GPTConfig(**SHAPE), device="cuda")
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), dtype, fp32_gradients=fp32_gradients)
    tokens = torch.randint(0, 256, (2, 32), device="cuda")
    with memory.track(model, optimizer) as t:
        model(tokens, tokens).backward()
        optimizer.step()
    precision_name = "bf16 + fp32 master" + " and gradients" * fp32_gradients
    expected = memory.model_state_bytes(model.config.parameter_count(), "adamw", precision_name)  # counters: on the CPU
    assert {name: t.now[name] for name in expected} == dict(expected)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", LOW)
def test_a_step_is_as_fast_as_torch_s_and_its_peak_no_higher(dtype):
    step, peak = precision.beside_torch(SIZE, "cuda", dtype, 21)
    assert peak["ratio"] <= peak["limit"]
    assert step["paired"] <= step["limit"], step
