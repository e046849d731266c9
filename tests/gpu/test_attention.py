"""The attention kernels on a GPU. What is asked is in tests/kits/attention_bodies.py, here are the sizes. Each task
compiles kernels of its own, so they run in several processes."""

import os

import in_processes
import pytest
import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [(1, 2), (2, 1), (63, 65), (64, 64), (113, 128), (128, 113), (200, 63), (65, 1023), (1023, 200), (1, 1023)]
HEAD_DIMS = [16, 40, 59, 64, 96, 111, 128, 256]
LAYOUTS = ["contiguous", "transposed", "columns apart", "shifted", "every other"]
MASKS = {"full": {}, "causal": {"causal": True}, "causal window": {"causal": True, "window": 30},
         "window": {"window": 50}, "dropout": {"dropout_p": 0.2, "seed": 7},
         "causal dropout": {"causal": True, "dropout_p": 0.3, "seed": 8}}
PACKED = {"cu_seqlens": [0, 63, 63, 64, 200], "cu_seqlens_k": [0, 65, 70, 70, 330]}


def tasks():
    """{name: (body, keyword arguments)}: the longest first, and last those that could hang a GPU."""
    found = {}

    def ask(body, dtype, *words, **arguments):
        name = ", ".join([body.replace("_", " "), str(dtype).removeprefix("torch."), *map(str, words)])
        assert name not in found
        found[name] = f"attention_bodies:{body}", {"device": "cuda", "dtype": dtype, **arguments}

    ask("sanitized", FP16, tool=["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"])
    ask("beyond_32_bits", BF16, rows=2**21 + 64, heads=16)
    for D, causal in ((64, True), (128, False)):
        ask("long_as_exact_as_plain", BF16, f"d{D}", "causal" if causal else "full", shape=(1, 1, 1, 16384, 16384, D),
            rows=2048, causal=causal)
    exactness(ask)
    behaviour(ask)
    for name, module, own in (("hopper", "triton_hopper", {}),
                              ("hopper, specialized", "triton_hopper", {"specialize": True}),
                              ("gluon_forward", "gluon_forward", {})):
        for_one_chip(ask, name, module, own)
    return found


def exactness(ask):
    """Every pair of lengths with every head_dim that fits the number, each time another mask and layout."""
    for dtype, rows in ((BF16, LENGTHS), (FP16, LENGTHS[::2]), (FP32, LENGTHS[1::4])):
        for i, (T, S) in enumerate(rows):
            for j in range(2):
                D, mask = HEAD_DIMS[(2 * i + j) % 8], list(MASKS)[(i + 3 * j) % 6]
                heads, layout = [(4, 2), (2, 2), (6, 1)][(i + j) % 3], LAYOUTS[(i + 2 * j) % 5]
                ask("as_exact_as_plain", dtype, f"{T}x{S}", f"d{D}", mask, layout, shape=(2, *heads, T, S, D),
                    layout=layout, **MASKS[mask])
        for D, mask in ((64, "causal"), (128, "causal dropout")):
            ask("as_exact_as_plain", dtype, "packed", f"d{D}", mask, shape=(1, 4, 2, 200, 330, D), **PACKED,
                **MASKS[mask])
    for dtype, D in ((BF16, 64), (BF16, 128), (BF16, 256), (FP16, 64)):
        ask("one_key_each", dtype, f"d{D}", "full", T=500, S=700, D=D)
        ask("one_key_each", dtype, f"d{D}", "causal", T=700, S=700, D=D, causal=True)
        ask("equal_weights", dtype, f"d{D}", T=200, n=10, D=D)


def behaviour(ask):
    """Repeats, memory, rows that see nothing, NaN; and what PyTorch makes of the operators."""
    for mask in ("full", "causal"):
        for D in (64, 128):
            ask("same_bits", BF16, f"d{D}", mask, shape=(1, 4, 2, 500, 500, D), repeats=1000, **MASKS[mask])
    ask("same_bits", FP16, "packed", shape=(1, 4, 2, 200, 330, 64), repeats=1000, **PACKED, **MASKS["causal dropout"])
    for D, options in ((64, MASKS["causal"]), (111, MASKS["window"]), (128, MASKS["dropout"])):
        ask("every_element_is_written", BF16, f"d{D}", shape=(2, 4, 2, 113, 200, D), **options)
    ask("every_element_is_written", BF16, "packed", shape=(1, 4, 2, 200, 330, 64), **PACKED)
    ask("fully_masked_rows", BF16)
    ask("not_finite", FP16)
    for options in (MASKS["causal"], MASKS["dropout"], {"cu_seqlens": [0, 30, 80], "causal": True}):
        ask("compiled_in_one_graph", BF16, *options, backend="inductor", **options)
    ask("operators_pass_opcheck", BF16)
    for dtype, options in ((BF16, MASKS["causal"]), (BF16, {"dropout_p": 0.1}), (FP32, {})):
        ask("bytes_are_exact", dtype, *options, shape=(2, 8, 4, 1000, 1200, 64), **options)
    for dtype in (FP32, BF16):
        ask("learns", dtype, steps=6, length=90)
    ask("on_another_device", BF16, other="cuda:1")


def for_one_chip(ask, name, module, own):
    """Shapes that suit a forward: rows of multiples of 16 bytes."""
    calls = (((1023, 1023), "causal", "contiguous"), ((200, 640), "full", "transposed"),
             ((640, 1023), "causal window", "transposed"), ((300, 129), "causal", "contiguous"),
             ((1, 257), "window", "contiguous"))
    for D, dtype, count in ((64, BF16, 5), (128, BF16, 5), (96, FP16, 2), (40, BF16, 2), (256, BF16, 3)):
        if D == 256 and name != "hopper":
            continue
        for (T, S), mask, layout in calls[:count]:
            ask("beside_the_definition", dtype, name, f"{T}x{S}", f"d{D}", mask, module=module, layout=layout,
                shape=(3, 4, 2, T, S, D), repeats=100, **MASKS[mask], **own)


TASKS = tasks()


@pytest.fixture(scope="module")
def found(cuda, request):
    """What became of the tasks that were chosen."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    chosen = {name: TASKS[name] for name in TASKS if name in names}
    torch.cuda.empty_cache()  # they have the device to themselves
    free, _ = torch.cuda.mem_get_info(cuda)
    seconds = float(os.environ.get("REFIMPL_ATTENTION_SECONDS", 150))
    return in_processes.outcomes(chosen, max(1, min(12, (os.cpu_count() or 2) - 2, free // (5 * 2**30))), seconds)


@pytest.mark.parametrize("name", TASKS)
def test_on_this_gpu(name, found):
    verdict, words = found[name]
    if verdict == in_processes.SKIPPED:
        pytest.skip(words)
    assert verdict == in_processes.PASSED, words
