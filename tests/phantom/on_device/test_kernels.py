"""Which kernels run, what they take inside, what a dry run for a GPU and an estimate say: beside PyTorch's allocator.

With numbers for small tensors (NUMBERS): by them the models decide how they mask.
"""

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import on_cuda_bodies
import pytest
import torch
from outside_programs import PROGRAMS
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from refimpl import memory, phantom
from refimpl.estimate import Options, estimate, kernels_of
from refimpl.estimate import tracked_step as steps
from refimpl.estimate.model_sources import find
from refimpl.memory.storage_records import START
from refimpl.model import built_in

pytestmark = [pytest.mark.bytes, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


def body(*arguments):
    """What differs, as a process without numbers prints it: with them, the CPU chooses."""
    path = os.pathsep.join([str(Path(on_cuda_bodies.__file__).parent), str(Path(phantom.__file__).parents[2])])
    done = subprocess.run([sys.executable, on_cuda_bodies.__file__, *arguments], capture_output=True, text=True,
                          env={**phantom.environment_without(), "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0"])
def test_attention_and_the_inside_of_kernels(capability):
    assert not body(capability)


def test_a_kernel_of_which_nothing_is_said_is_seen():
    assert body("8.0", "sum").count("aten.sum.dim_IntList") > 10


# --- a dry run for a GPU ----------------------------------------------------------------------------------------------


def new(*shape, dtype=torch.float32, device="cpu", grad=True):
    return torch.empty(*shape, dtype=dtype, device=device, requires_grad=grad)


def attended(device, dtype=torch.bfloat16, **options):
    q = new(2, 4, 64, 20, dtype=dtype, device=device)
    return F.scaled_dot_product_attention(q * 1, q * 1, q * 1, **options)


def cast(device, function):
    with torch.autocast(device, torch.bfloat16):
        return function(new(8, 16, device=device) @ new(16, 16, device=device))


COMPOSED = {
    "dropout": lambda d: F.dropout(new(8, 16, device=d) * 1, 0.1),
    "dropout of nothing": lambda d: F.dropout(new(8, 16, device=d) * 1, 0.0),
    "dropout of all": lambda d: F.dropout(new(8, 16, device=d) * 1, 1.0),
    "dropout in place": lambda d: F.dropout(new(8, 16, device=d) * 1, 0.1, inplace=True),
    "rms_norm": lambda d: F.rms_norm(new(8, 16, device=d), (16,), new(16, device=d)),
    "rms_norm of two types": lambda d: F.rms_norm(new(8, 16, device=d, dtype=torch.bfloat16), (16,), new(16, device=d)),
    "layer_norm in bf16": lambda d: F.layer_norm(new(8, 16, device=d, dtype=torch.bfloat16), (16,)),
    "attention of 20": lambda d: attended(d, dropout_p=0.1),
    "attention in fp32": lambda d: attended(d, torch.float32, is_causal=True),
    "masked attention": lambda d: attended(d, torch.float32, attn_mask=torch.ones(64, 64, dtype=torch.bool, device=d)),
    "attention of float64": lambda d: attended(d, torch.float64),
    "mse": lambda d: F.mse_loss(new(8, 16, device=d), new(8, 16, device=d)),
    **{f"autocast, {name}": lambda d, function=function: cast(d, function) for name, function in {
        "pow": lambda x: x**3, "softmax": lambda x: x.softmax(-1), "sum": lambda x: x.sum(), "exp": torch.exp,
        "gelu": F.gelu, "layer_norm": lambda x: F.layer_norm(x, (16,)), "rms_norm": lambda x: F.rms_norm(x, (16,)),
        "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(-1)), "cat": lambda x: torch.cat([x, x.float()]),
        "again a product": lambda x: (x.softmax(-1) @ x.T), "attention": lambda x: F.scaled_dot_product_attention(
            x.view(1, 1, 8, 16), x.view(1, 1, 8, 16), x.float().view(1, 1, 8, 16))}.items()},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_operations_are_composed_as_on_the_device(name):
    """The storages that a program makes, forward and backward: their operation, shape and type."""

    def run(device):
        output = COMPOSED[name](device)
        output.backward(torch.empty_like(output))

    def storages(trace):
        scalars = ("full", "zeros", "scalar_tensor", "new_zeros")  # numbers are made in several ways
        return [(r.op, r.shape, r.dtype, r.nbytes) for r in trace.records if r.op not in scalars]

    with _disable_current_modes(), memory.track() as real:
        run("cuda")
    with _disable_current_modes():
        assert storages(memory.dry_run(run, "cpu", gpu=kernels_of("h100-sxm"))) == storages(real)


# --- estimates --------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
         "max_position_embeddings": 512}
GATED = {**SIZES, "intermediate_size": 1376, "num_key_value_heads": 2}
CONFIGS = {
    "gpt2": {"vocab_size": 8192, "n_positions": 512, "n_embd": 512, "n_layer": 4, "n_head": 8}, "llama": GATED,
    "qwen2": {**GATED, "tie_word_embeddings": True}, "opt": {**SIZES, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "gpt_neox": {**SIZES, "intermediate_size": 2048, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"vocab_size": 8192, "hidden_size": 512, "n_layer": 4, "n_head": 8}, "gemma2": {**GATED, "head_dim": 64},
    "phi": {**SIZES, "intermediate_size": 2048, "resid_pdrop": 0.1}, "mistral": {**GATED, "sliding_window": 128},
    "qwen3": {**GATED, "head_dim": 128}}
OURS = """
from refimpl.model import GPT, GPTConfig
CONFIG = {"vocab_size": 8192, "context_length": 512, "layers": 4, "hidden": 512, "heads": 8}
def gpt(): return GPT(GPTConfig(**CONFIG, dropout=0.1))
def gated(): return GPT(GPTConfig(**CONFIG, kv_heads=2, norm="rmsnorm", activation="swiglu", positions="rotary"))
"""
WAYS = [{"precision": "fp32"}, {"precision": "bf16", "optimizer": "adamw-fused"}, {"precision": "autocast"},
        {"precision": "autocast", "optimizer": "adamw-fused", "recompute": True}]
OWN = ("gpt", "gated")  # decide nothing by numbers
CASES = [(name, WAYS[i % 4]) for i, name in enumerate([*CONFIGS, *OWN])]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "ours.py").write_text(OURS)
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps({"model_type": name, **config}))
    return {**{name: f"{folder}/{name}.json" for name in CONFIGS},
            **{name: f"{folder}/ours.py:{name}" for name in ("gpt", "gated")}}


@pytest.mark.parametrize(("name", "way"), CASES, ids=[" ".join([n, *map(str, way.values())]) for n, way in CASES])
def test_an_estimate_is_what_the_allocator_reads(names, name, way, monkeypatch):
    """Peak of a step without workspaces within 0.1 %, reserved within 1 %."""
    options = {**way, "batch": 4, "sequence": 512}
    with monkeypatch.context() as patched, _disable_current_modes() if name in OWN else nullcontext():
        peak, reserved = read(names[name], Options(**options), patched)
    found = estimate(names[name], gpu="h100-sxm", **options)
    assert found.peak.total == pytest.approx(peak, rel=0.001) and found.reserved == pytest.approx(reserved, rel=0.01)


def read(name, options, monkeypatch):
    """(requested at the peak of the second step, without cuBLAS's workspaces; reserved)."""
    forget_workspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with built_in(options.dtype, None):
        model, args, kwargs = find(name, options).build()
    model.train().cuda()
    args, kwargs = [x.cuda() for x in args], {key: value.cuda() for key, value in kwargs.items()}
    if options.recompute:
        steps._recompute(model)
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, *rest: autocast("cuda", *rest))
    loop = steps._PlainLoop(model, options)
    for _ in range(2):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss = steps._loss(model, args, kwargs, options)
        with _disable_current_modes():  # with numbers PyTorch's engine would add gradients up out of place
            loss.backward()
            del loss
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    workspaces = stats["requested_bytes.all.current"] - forget_workspaces()
    return stats["requested_bytes.all.peak"] - workspaces - before, stats["reserved_bytes.all.peak"]


def forget_workspaces():
    """Give back cuBLAS's workspaces and what is cached; return the bytes that are still asked for."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


# --- models that others wrote -----------------------------------------------------------------------------------------

WITHOUT = {"fnet, complex numbers", "rwkv"}  # cuFFT and cuSOLVER are not on the device
ELSEWHERE = ("Trainer", "Accelerate", "wav2vec2")  # they place tensors themselves
OUTSIDE = [name for name in PROGRAMS if name not in WITHOUT and not name.startswith(ELSEWHERE)]


@pytest.mark.parametrize("name", OUTSIDE[::2])
def test_the_tracker_reads_the_allocators_peak(name):
    """Within 0.5 %, on programs of transformers, timm and peft, in a step that is not the first."""
    torch.set_default_device("cuda")
    try:
        program = warmed_up(name)
        with memory.measure("cuda") as m:
            program.step()
        program = warmed_up(name)
        with memory.track(*program.objects) as t:
            program.step()
    finally:
        torch.set_default_device("cpu")
    held = peak = 0
    for _, record, nbytes in t.events:
        if t.records[record].op != START and t.records[record].device == "cuda:0":
            held += nbytes
            peak = max(peak, held)
    assert peak == pytest.approx(m.peak, rel=0.005)


def warmed_up(name):
    program = PROGRAMS[name]()
    program.step()
    program.step()
    gc.collect()
    return program
