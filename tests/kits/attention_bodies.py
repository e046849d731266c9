"""What a GPU is asked of the attention kernels: each body is called with a device and a dtype, on a GPU by tests/gpu,
and at tiny sizes on the CPU, interpreted, by tests/attention, so that nothing here runs for the first time on a GPU."""

import functools
import importlib
import itertools
import math
import os
import shutil
import subprocess
import sys

import attention_kit as kit
import pytest
import torch

from refimpl import memory
from refimpl.attention import flash_attention, flash_attention_bytes, reference_attention, triton_forward
from refimpl.attention.kernels.operators import attention_backward, attention_delta, attention_forward
from refimpl.attention.kernels.tile import Problem
from refimpl.model import GPT, GPTConfig


def as_exact_as_plain(device, dtype, shape, layout="contiguous", **options):
    """The rule of the field, forward and backward. `shape`: (B, H, G, T, S, D)."""
    q, k, v, gradient = laid_out(kit.inputs(*shape, dtype, device=device), layout)
    kit.assert_as_exact_as_plain(flash_attention, reference_attention, q, k, v, gradient, **options)


def laid_out(tensors, layout):
    """q, k, v and the gradient with the same values, otherwise in memory."""
    change = {"contiguous": lambda x: x, "transposed": lambda x: kit.transposed(x)[0],
              "columns apart": lambda x: x.mT.contiguous().mT,
              "every other": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
              "shifted": lambda x: torch.cat([x[..., :1], x], dim=3)[..., 1:]}[layout]  # rows that begin anywhere
    *qkv, gradient = (change(x.detach()) for x in tensors)
    return *(x.requires_grad_() for x in qkv), gradient


def long_as_exact_as_plain(device, dtype, shape, rows, **options):
    """The same for sequences whose whole matrix is too large: both sides in chunks of so many queries."""
    exact, plain = (functools.partial(chunked, f, rows) for f in (reference_attention, kit.plain))
    given = kit.inputs(*shape, dtype, device=device)
    kit.assert_as_exact_as_plain(flash_attention, exact, *given, plain=plain, **options)


def chunked(attention, rows, q, k, v, *, causal):
    """As many queries as keys; each chunk of queries with the keys that it sees."""
    T = q.shape[2]
    return torch.cat([attention(q[:, :, i : i + rows], *(x[:, :, : min(T, i + rows) if causal else T] for x in (k, v)),
                                causal=causal) for i in range(0, T, rows)], dim=2)


def one_key_each(device, dtype, T, S, D, causal=False):
    """Every query sees one key alone, by so much that all other weights are 0: the output is that row of v, bit by bit,
    and the gradient of q and k is 0. A fault in a matrix product's operands shows, however small."""
    generator = torch.Generator().manual_seed(1)
    code, bits = torch.randint(0, 2, (S, D), generator=generator), (S - 1).bit_length()
    code[:, :bits] = torch.arange(S)[:, None] >> torch.arange(bits) & 1  # no two keys are the same
    code = 2 * code - 1
    last = torch.arange(T) + S - T if causal else torch.full((T,), S - 1)
    chosen = (torch.rand(T, generator=generator) * (last + 1)).long().minimum(last)
    v = torch.randint(-120, 121, (S, D), generator=generator)
    q, k, v = (x.to(device, dtype)[None, None].requires_grad_() for x in (64 * code[chosen], code, v))
    out, lse = flash_attention(q, k, v, causal=causal, scale=1.0, return_logsumexp=True)
    assert torch.equal(out[0, 0], v[0, 0, chosen.to(device)])
    assert torch.allclose(lse, torch.full_like(lse, 64.0 * D), rtol=1e-6)
    gradient = torch.randint(-3, 4, (T, D), generator=generator).to(device, dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), gradient[None, None])
    assert (dq == 0).all() and (dk == 0).all()
    expected = torch.zeros(S, D, dtype=torch.float64, device=device).index_add_(0, chosen.to(device), gradient.double())
    assert torch.allclose(dv[0, 0].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def equal_weights(device, dtype, T, n, D):
    """2ⁿ keys of equal weight and v of small integers: sums and quotients without any rounding but the last."""
    generator, q = torch.Generator().manual_seed(2), torch.zeros(1, 2, T, D, dtype=dtype, device=device)
    k, v = (torch.randint(-9, 10, (1, 2, 2**n, D), generator=generator).to(device, dtype) for _ in range(2))
    out, lse = flash_attention(q, k, v, return_logsumexp=True)
    expected = v.float().sum(2, keepdim=True) / 2**n
    assert torch.equal(out, expected.to(dtype).expand_as(out))
    assert torch.allclose(lse, torch.full_like(lse, n * math.log(2)), rtol=1e-6)


def same_bits(device, dtype, shape, repeats, **options):
    """Forward and backward, over and over."""
    given, differ = kit.inputs(*shape, dtype, device=device), torch.zeros((), dtype=torch.int64, device=device)
    first = kit.gradients(flash_attention, *given, **options)
    for _ in range(repeats):
        for a, b in zip(kit.gradients(flash_attention, *given, **options), first, strict=True):
            differ += (a != b).any()  # looked at once, at the end
    assert differ == 0 and all(x.isfinite().all() for x in first)


def every_element_is_written(device, dtype, shape, **options):
    """Memory that is handed out full of NaN gives the same."""
    inputs = kit.inputs(*shape, dtype, device=device)
    expected = kit.gradients(flash_attention, *inputs, **options)
    with kit.memory_full_of_nan(warn_only=True):
        assert torch.empty(2, device=device).isnan().all()
        found = kit.gradients(flash_attention, *inputs, **options)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(found, expected, strict=True))


def fully_masked_rows(device, dtype):
    """Zeros and −∞, and no gradient whatever comes back to them."""
    kit.assert_rows_that_see_nothing(flash_attention, *kit.inputs(2, 4, 2, 90, 40, 64, dtype, device=device))


def not_finite(device, dtype):
    """NaN and infinity go where softmax takes them, forward and backward, and to no row that does not see them."""
    both = flash_attention, reference_attention
    for which, value in itertools.product((0, 1, 2), (math.nan, math.inf, -math.inf)):
        given = kit.inputs(1, 2, 1, 48, 48, 64, dtype, requires_grad=False, device=device)
        given[which][0, :, 40, 1] = value
        q, k, v = (x.requires_grad_() for x in given[:3])
        for a, b in zip(*(kit.gradients(f, q, k, v, given[3]) for f in both), strict=True):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isposinf(), b.isposinf())
        ours, reference = (f(q, k, v, causal=True) for f in both)
        assert torch.equal(ours[:, :, 40:].isnan(), reference[:, :, 40:].isnan())
        assert which == 2 or ours[:, :, :40].isfinite().all()  # of v, 0 · ∞ may reach rows of the same tile


def beyond_32_bits(device, dtype, rows, heads):
    """q (and out), then k and v, of more elements than 32 bits count: the last rows are those of the reference."""
    for T, S in ((rows, 32), (32, rows)):
        _beyond_32_bits(device, dtype, T, S, heads)


def _beyond_32_bits(device, dtype, T, S, heads, D=64):
    needed = 6 * max(T, S) * heads * D * dtype.itemsize
    if torch.device(device).type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.5 * needed:
        pytest.skip(f"needs {1.5 * needed:,} bytes of free memory")
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, gradient = (torch.randn(1, heads, length, D, generator=generator, device=device, dtype=dtype)
                         for length in (T, S, S, T))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, dq, dk, dv = kit.gradients(flash_attention, q, k, v, gradient, window=None if T > S else 64)
    if T > S:  # the last head's last queries; dk and dv are sums over all of them
        tail, keys = [x[:, -1:, -64:].detach() for x in (q, gradient)], [x[:, -1:].detach() for x in (k, v)]
        expected = kit.gradients(reference_attention, *(x.requires_grad_() for x in (tail[0], *keys)), tail[1])
        found = out[:, -1:, -64:], dq[:, -1:, -64:]
    else:  # with a window the last 32 queries see the last keys alone
        own = [x[:, -1:, -256:].detach().requires_grad_() for x in (q, k, v)]
        expected = kit.gradients(reference_attention, *own, gradient[:, -1:], window=64)
        found = out[:, -1:], dq[:, -1:], dk[:, -1:, -256:], dv[:, -1:, -256:]
    kit.assert_close(*([x.float() for x in each] for each in (found, expected[:len(found)])), 0.02)


def on_another_device(device, dtype, other):
    """Launched where its tensors are, and not where the process happens to be."""
    if torch.device(other).type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = kit.inputs(1, 2, 1, 100, 100, 64, dtype, device=device)
    moved = [x.detach().to(other).requires_grad_(x.requires_grad) for x in inputs]
    for a, b in zip(*(kit.gradients(flash_attention, *x, causal=True) for x in (inputs, moved)), strict=True):
        assert b.device == torch.device(other) and torch.equal(a.cpu(), b.cpu())


def compiled_in_one_graph(device, dtype, backend, **options):
    """torch.compile gives what the call itself gives."""
    inputs = kit.inputs(1, 2, 1, 80, 80, 64, dtype, device=device)
    def call(q, k, v):
        return flash_attention(2 * q, k, v, **options) + 1

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    kit.assert_close(*([x.float() for x in kit.gradients(f, *inputs)] for f in (compiled, call)), 0.01)


def operators_pass_opcheck(device, dtype):
    """PyTorch's own checks of the three operators."""
    opcheck(*kit.inputs(1, 2, 1, 40, 40, 32, dtype, device=device), 0.25, True, None, 0.0, None, None, None, 0, 0)


def opcheck(q, k, v, d_out, *options):
    """The same, of the operators' own options."""
    torch.library.opcheck(attention_forward, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse2 = attention_forward(q, k, v, *options)
    for gradient_of_lse in (None, lse2):
        torch.library.opcheck(attention_delta, (out, d_out, gradient_of_lse))
    torch.library.opcheck(attention_backward, (d_out, q, k, v, lse2, attention_delta(out, d_out, None), *options))


def bytes_are_exact(device, dtype, shape, **options):
    """Closed form, tracker and allocator: the same bytes."""
    B, H, G, T, S, D = shape
    q, k, v, gradient = kit.inputs(*shape, dtype, device=device)
    options = {"seed": 1} | options
    kit.gradients(flash_attention, q, k, v, gradient, **options)  # what is compiled and loaded once is there
    with memory.track(q, k, v, gradient) as t, memory.measure(device) as m:
        out = flash_attention(q, k, v, **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    options.pop("seed")
    predicted = flash_attention_bytes((B, H, T, D), (B, G, S, D), dtype, **options)
    assert predicted == (kept, t.peak.total - t.start.total)
    assert abs(m.peak - predicted.peak) <= 0.01 * predicted.peak


def learns(device, dtype, steps, length):
    """A GPT learns with the kernels as with the definition: the same losses, step by step."""
    config = GPTConfig(vocab_size=64, context_length=length, layers=2, hidden=64, heads=4, kv_heads=2)
    def losses(attention):
        torch.manual_seed(0)
        model, found = GPT(config, attention, dtype=dtype).to(device), []
        tokens, optimizer = torch.randint(0, 64, (2, length)).to(device), torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            found.append(model(tokens, tokens))
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(found).detach()

    ours, expected = losses(flash_attention), losses(reference_attention)
    assert torch.allclose(ours, expected, rtol=1e-3 if dtype == torch.float32 else 0.02), (ours, expected)
    assert ours[-1] < ours[0]


def for_hopper(device):
    """Skips where the device is another chip."""
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip(f"for compute capability 9.0, this one has {torch.cuda.get_device_capability(device)}")


def by_pointers(q, k, v, *, scale, causal, window):
    """The pointer kernel's forward."""
    problem = Problem.of(q, k, scale, causal, window, 0.0, None, None, None, 0, 0)
    return triton_forward.forward(q, k, v, problem)


def beside_the_definition(device, dtype, module, shape, repeats, layout="contiguous", causal=False, window=None, **own):
    """A module's own forward, of inputs that suit it: the rule of the field, the logsumexp, every element written, the
    same bits each time, and next to those of the pointer kernel. `own`: options of that forward."""
    for_hopper(device)
    module = importlib.import_module(f"refimpl.attention.{module}")
    q, k, v, _ = (x.detach() for x in laid_out(kit.inputs(*shape, dtype, device=device), layout))
    assert module.suits(q, k, v)
    options = {"causal": causal, "window": window}
    scaled = {**options, "scale": shape[-1] ** -0.5}
    exact, lse = reference_attention(*(x.double() for x in (q, k, v)), return_logsumexp=True, **options)
    theirs = kit.plain(q, k, v, **options)
    pointers, _ = by_pointers(q, k, v, **scaled)
    with kit.memory_full_of_nan(warn_only=True):
        out, lse2 = module.forward(q, k, v, **scaled, **own)
    errors = [(x.double() - exact).abs().max().item() for x in (out, theirs, pointers)]
    largest, eps = exact.abs().max().item(), torch.finfo(dtype).eps
    assert errors[0] <= max(2 * errors[1], eps * largest), (errors, largest)
    assert (out.double() - pointers.double()).abs().max() <= 2 * max(errors[2], eps * largest)
    assert out.dtype == dtype and lse2.dtype == torch.float32
    assert torch.allclose(lse2.double() * math.log(2), lse, rtol=1e-5, atol=1e-5)  # −∞ is close to itself
    for _ in range(repeats):
        assert all(map(torch.equal, module.forward(q, k, v, **scaled, **own), (out, lse2)))


SANITIZED = """
import torch, attention_bodies as bodies
for shape, options in (((1, 2, 1, 65, 63, 40), {"causal": True}), ((2, 2, 2, 17, 130, 64), {"window": 20})):
    inputs = bodies.kit.inputs(*shape, torch.float16, device="DEVICE")
    bodies.kit.gradients(bodies.flash_attention, *inputs, **options)
print("done")
"""


def sanitized(device, dtype, tool):
    """Every load and store of forward and backward lies in memory that was asked for. `tool`: a command, by default
    NVIDIA's compute-sanitizer, to be put before Python's."""
    if tool and shutil.which(tool[0]) is None:
        pytest.skip(f"needs {tool[0]} on PATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                                "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a neighbour's memory is allowed, too
    done = subprocess.run([*tool, sys.executable, "-c", SANITIZED.replace("DEVICE", device)], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("done" if not tool else "0 errors"), (
        done.stdout[-4000:] + done.stderr[-4000:])
