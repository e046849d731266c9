"""AdamW on a range of elements: the same bits as torch's fused kernel, in each dtype, whatever the threads."""

import copy
import functools
import gc
import os
import pickle
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from refimpl.common import compiling
from refimpl.common.compiling import CannotCompile
from refimpl.offload import adamw_kernels as kernels
from refimpl.offload.adamw_kernels import CompiledKernel, Hyper, TorchKernel, kernel_of

HYPERS = [Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 3), Hyper(3e-4, 0.9, 0.95, 1e-8, 0.0, 1), Hyper(0.1, 0.5, 0.9, 0.1, 1, 50)]
KINDS = {"torch": TorchKernel, "c++": CompiledKernel}
TILE = 2**16


def numbers(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    p, m, g = (torch.randn(n, generator=generator) * scale for scale in (1, 0.1, 0.1))
    return [p, m, torch.rand(n, generator=generator) * 0.01, g.to(dtype)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", kernels.CODES)
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_multiples_of_64_ki_are_bit_equal_to_torchs_fused_kernel(kind, hyper, dtype, threads):
    for n in (TILE, 5 * TILE):
        ours, expected, low = numbers(n, dtype), numbers(n, dtype), torch.zeros(n, dtype=dtype)
        KINDS[kind](threads).update(*ours, low, hyper)
        p, m, v, g = expected
        torch._fused_adamw_([p], [g.float()], [m], [v], [], [torch.tensor(float(hyper.step))], lr=hyper.lr,
                            beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps, weight_decay=hyper.weight_decay,
                            amsgrad=False, maximize=False)
        assert all(map(torch.equal, ours, expected)) and torch.equal(low, expected[0].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 15, 4097, TILE + 5, 3 * TILE - 1])
def test_other_sizes_are_within_1e_6_of_foreach(kind, n):
    hyper, ours, (p, m, v, g) = HYPERS[0], numbers(n), numbers(n)
    KINDS[kind](2).update(*ours, None, hyper)
    own = torch.nn.Parameter(p)
    optimizer = torch.optim.AdamW([own], lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps,
                                  weight_decay=hyper.weight_decay, foreach=True)
    optimizer.state[own] = {"step": torch.tensor(hyper.step - 1.0), "exp_avg": m, "exp_avg_sq": v}
    own.grad = g
    optimizer.step()
    assert torch.allclose(ours[0], own.detach(), rtol=1e-6, atol=1e-6)


def test_what_is_no_number_is_rounded_as_torch_does():
    p = torch.tensor([float("nan"), float("inf"), -float("inf"), 65519.0, 65520.0, 1e-8, 3.4e38, -0.0] * 64)
    for dtype in (torch.bfloat16, torch.float16):
        low, zeros = torch.zeros(512, dtype=dtype), [torch.zeros(512) for _ in range(3)]
        CompiledKernel(1).update(p.clone(), *zeros, low, Hyper(0.0, 0.9, 0.999, 1e-8, 0.0, 1))
        expected = (p + 0.0).to(dtype)
        assert torch.equal(low.isnan(), expected.isnan()) and torch.equal(low[~low.isnan()], expected[~low.isnan()])


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_threads_are_as_before(kind):
    before = torch.get_num_threads()
    KINDS[kind](before + 1).update(*numbers(TILE), None, HYPERS[0])
    assert torch.get_num_threads() == before


def test_the_compiled_kernel_is_taken_where_a_compiler_is():
    assert [kernel_of(name)[0].name for name in ("auto", "c++", "torch")] == ["c++", "c++", "torch"]
    assert kernel_of("auto", 3)[0].threads == 3 and kernel_of("torch", "auto")[0].threads >= 1
    assert kernel_of("torch")[0].threads == torch.get_num_threads()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_kernel_and_a_copy_update_as_the_kernel_does(kind):
    """Ranks get theirs pickled, as `launch(train, 2, CPUAdam())`."""
    kernel, expected = KINDS[kind](3), numbers(TILE)
    kernel.update(*expected, None, HYPERS[0])
    for other in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
        ours = numbers(TILE)
        other.update(*ours, None, HYPERS[0])
        assert other.threads == 3 and all(map(torch.equal, ours, expected))


def test_a_forked_process_updates_on_threads_of_its_own_and_keeps_none_of_its_parents(monkeypatch):
    parents = ThreadPoolExecutor(1)
    monkeypatch.setattr(kernels, "_pools", {os.getpid(): parents})
    kernel, kept, (ours, expected) = CompiledKernel(3), weakref.ref(parents), (numbers(3 * kernels.PIECE) for _ in "12")
    TorchKernel(1).update(*expected, None, HYPERS[0])
    del parents
    if not (child := os.fork()):
        status = 1
        signal.alarm(60)  # who hangs ends
        try:
            kernel.update(*ours, None, HYPERS[0])
            gc.collect()
            status = int(kept() is not None or not all(map(torch.equal, ours, expected)))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_library", functools.cache(kernels._library.__wrapped__))
    return tmp_path / "refimpl"


def test_without_a_compiler_torch_is_taken_and_the_reason_is_given(nothing_compiled, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel, reason = kernel_of("auto")
    assert kernel.name == "torch" and reason == "no C++ compiler: none of no-such-compiler is on PATH"
    with pytest.raises(CannotCompile, match="no-such-compiler"):
        kernel_of("c++")


def test_a_compiler_that_fails_is_quoted_and_leaves_no_file(nothing_compiled, tmp_path):
    (tmp_path / "bad.cpp").write_text("this is no C++")
    with pytest.raises(CannotCompile, match="fails on bad.cpp: .*error"):
        compiling.compiled(tmp_path / "bad.cpp")
    assert list(nothing_compiled.iterdir()) == []


def test_it_is_compiled_once(nothing_compiled, monkeypatch):
    compiling.compiled(kernels.SOURCE)
    library, = nothing_compiled.glob("*.so")
    assert set(nothing_compiled.iterdir()) == {library, library.with_suffix(".sha256")}
    monkeypatch.setattr(compiling, "_compile", None)
    compiling.compiled(kernels.SOURCE)
    assert library.stat().st_nlink == 1


def test_a_cache_that_cannot_be_written_is_named(nothing_compiled, tmp_path):
    (tmp_path / "refimpl").write_text("a file where the directory would be")
    with pytest.raises(CannotCompile, match="XDG_CACHE_HOME"):
        compiling.compiled(kernels.SOURCE)


@pytest.mark.parametrize(("options", "words"), [
    ({"name": "cuda"}, "kernel='cuda'"), ({"threads": 0}, "threads=0"), ({"threads": 1.5}, "threads=1.5")])
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        kernel_of(**options)


def test_a_dtype_that_the_kernel_does_not_know_is_refused():
    with pytest.raises(TypeError, match="kernel='torch'"):
        CompiledKernel(1).update(*numbers(16, torch.float64), None, HYPERS[0])
