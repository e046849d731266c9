"""Bytes of PyTorch's own allocator: by hand, beside what a real GPU recorded, and in its own words."""

import json
import os
import re
import resource
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from benchmarks.recordings import FOLDER, PROGRAMS
from refimpl import memory, phantom
from refimpl.allocator import Snapshot
from refimpl.model import GPT, GPTConfig

GIB = 2**30
H200 = FOLDER / "nvidia-h200"
APART = {"training", "training_split", "collected", "streams"}


def test_parameters_gradients_and_adam_are_counted_by_hand():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    each = [4 * p.numel() for p in model.parameters()]
    blocks = sum(-(-nbytes // 512) * 512 for nbytes in each)
    assert torch.cuda.memory_allocated() == blocks
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(64, 512, device="cuda")).sum().backward()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 2 * sum(each)
    optimizer.step()
    assert torch.cuda.memory_allocated() == 4 * blocks, "step counters are on the host"
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() == 3 * blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tracker_has_the_third_tensor_of_softmax_s_backward(dtype):
    x = torch.empty(4, 8, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
    out, d_out = x.softmax(-1), torch.empty_like(x)
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with memory.track(x, out, d_out) as t:
        out.backward(d_out)
    read = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert t.peak.total - t.start.total == read == 2 * x.nbytes


def test_an_out_of_memory_error_has_pytorch_s_words():
    total = torch.cuda.mem_get_info()[1]
    kept = [torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    expected = json.loads((H200 / "readings.json").read_text())["out of memory"]["whole"]
    for pattern, ours in ((r"allocate \S+ GiB", f"allocate {2 * total / GIB:.2f} GiB"),
                          (r"capacity of \S+ GiB", f"capacity of {total / GIB:.2f} GiB"),
                          (r"of which \S+ GiB", f"of which {free / GIB:.2f} GiB"),
                          (r"process has \S+ GiB", f"process has {(total - free) / 2**20:.2f} MiB")):
        expected = re.sub(pattern, ours, expected)
    said = str(caught.value).replace("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its name since 2.12
    assert said.partition("  See documentation")[0] == expected.partition("  See documentation")[0]
    assert torch.cuda.memory_stats()["num_ooms"] >= 1 and len(kept) == 3


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_that_an_h200_recorded(name, tmp_path):
    """Each event with its address is the one that was kept of this PyTorch, to which `replay` is held. Of 2.11 they are
    the H200's, one after the other; where they differ (APART) a real driver's addresses decide which of two equal
    blocks is taken, or its streams when a block is free."""
    path = tmp_path / "found.pickle.gz"
    subprocess.run([sys.executable, "-m", "benchmarks.recordings", name, str(path)], check=True, capture_output=True,
                   env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": PROGRAMS[name][1]})
    ours, theirs = Snapshot.load(path).entries, Snapshot.load(H200 / f"{name}.pickle.gz").entries
    kept = Snapshot.load(FOLDER / f"phantom-{torch.__version__.partition('+')[0]}" / f"{name}.pickle.gz").entries
    assert [taken(e, "addr") for e in ours] == [taken(e, "addr") for e in kept]
    requests = [[e["size"] for e in entries if e["action"] == "alloc"] for entries in (ours, theirs)]
    if torch.__version__ >= (2, 12):
        assert len(requests[0]) > 50 and abs(len(requests[0]) / len(requests[1]) - 1) < 0.1
        return
    assert requests[0] == requests[1]
    if name not in APART:
        assert [taken(e) for e in ours] == [taken(e) for e in theirs]


def taken(entry, *more):
    return [entry.get(key) for key in ("action", "size", *more)]  # an "oom" has no address


def test_trainings_take_what_they_took_on_an_h200():
    """Ours, of PyTorch 2.11 to the byte: requested and reserved, after forward, backward and each of three steps."""
    readings = json.loads((H200 / "readings.json").read_text())["training"]
    for precision, optimizer in (("fp32", "foreach"), ("autocast", "fused"), ("bf16", "fused")):
        found = trained(precision, optimizer == "fused")
        expected = [[(part["reqpk"], part["resvpk"]) for part in step]
                    for step in readings[f"ours {precision} {optimizer}"][1:]]
        if torch.__version__ < (2, 12):
            assert found == expected, precision
        else:
            peaks = [[max(part[i] for step in steps for part in step) for i in (0, 1)] for steps in (found, expected)]
            assert peaks[0] == pytest.approx(peaks[1], rel=0.02), precision


def trained(precision, fused):
    """Peaks (requested, reserved) of three steps of a GPT in a process of its own, as the readings were made."""
    program = f"""
import json, torch
from refimpl.model import GPT, GPTConfig
torch.manual_seed(0)
dtype = torch.bfloat16 if {precision!r} == "bf16" else torch.float32
model = GPT(GPTConfig(vocab_size=50257, context_length=1024, layers=6, hidden=768, heads=12)).to("cuda", dtype).train()
optimizer, found = torch.optim.AdamW(model.parameters(), fused={fused}), []
x = torch.randint(0, 30000, (4, 512), device="cuda")
def peaks():
    stats = torch.cuda.memory_stats()
    found[-1].append((stats["requested_bytes.all.peak"], stats["reserved_bytes.all.peak"]))
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    found.append([])
    with torch.autocast("cuda", torch.bfloat16, enabled={precision!r} == "autocast"):
        loss = model(x, x)
    peaks()
    loss.backward()
    peaks()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    peaks()
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [[tuple(part) for part in step] for step in json.loads(done.stdout.splitlines()[-1])]


def test_sdpa_takes_the_kernel_that_it_takes_on_an_h200():
    expected = json.loads((H200 / "readings.json").read_text())["attention"]
    kinds = {"causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1}, "gqa": {"enable_gqa": True}, "plain": {},
             "mask": {"attn_mask": torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()}}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, kernel in expected.items():
        dtype, D, kind = name.split()
        q, k, v = (torch.randn(2, 2 if kind == "gqa" and i else 4, 256, int(D), device="cuda", dtype=dtypes[dtype],
                               requires_grad=True) for i in range(3))
        found = nn.functional.scaled_dot_product_attention(q, k, v, **kinds[kind]).grad_fn
        if torch.__version__ < (2, 12):
            assert type(found).__name__ == kernel, name
        else:  # each version chooses anew: of 2.14 a kernel for grouped heads in fp32, flash with dropout
            assert type(found).__name__.startswith("ScaledDotProduct"), name


def test_eight_devices_have_a_memory_each():
    assert torch.cuda.device_count() == 8
    kept = [torch.empty(GIB, dtype=torch.uint8, device=f"cuda:{i}") for i in range(8)]
    for i in range(8):
        assert torch.cuda.memory_allocated(i) == GIB
        assert torch.cuda.mem_get_info(i)[0] == torch.cuda.mem_get_info(i)[1] - GIB
    assert {x.device.index for x in kept} == {*range(8)}
    assert torch.equal(torch.arange(9).to("cuda:3").to("cuda:5").cpu(), torch.arange(9))


def test_a_step_of_seven_billion_parameters_takes_a_second_and_little_of_the_host():
    config = GPTConfig(vocab_size=32000, context_length=2048, layers=32, hidden=4096, heads=32, mlp_hidden=11008,
                       norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, tied=False)
    with torch.device("cuda"):
        model = GPT(config, dtype=torch.bfloat16)
    tokens, before = torch.zeros(1, 2048, dtype=torch.int64, device="cuda"), resource.getrusage(resource.RUSAGE_SELF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    assert torch.cuda.max_memory_allocated() > 2 * sum(p.numel() for p in model.parameters()) > 13e9
    assert min(seconds) < 1.0 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2e6 > before.ru_maxrss


def test_what_is_said_of_it():
    assert torch.cuda.get_device_name() == "Phantom" and phantom.words(torch.__version__).startswith("PyTorch 2.")
