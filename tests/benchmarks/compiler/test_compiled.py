"""The compile report, on kernels made for it: one that is fine, one that spills, one too large for shared memory."""

import re
import subprocess
from collections import Counter

import pytest
import torch
import triton

from benchmarks.compiler import processes
from benchmarks.compiler.compiled import BIN, Case, as_launched, compile_kernel
from benchmarks.compiler.processes import compile_each
from refimpl.attention.kernels.configs import Config
from refimpl.attention.kernels.tile import Problem
from refimpl.attention.triton_backward import backward_launches, delta_launch
from refimpl.attention.triton_forward import forward_launch

POINTER = "*bf16:16"


def product(a=POINTER, b=POINTER, out=POINTER, stride="i32:16", N=64, num_warps=4, **options):
    arguments = {"a_ptr": a, "b_ptr": b, "out_ptr": out, "stride": stride, "N": N}
    return Case("kernels_to_compile:product", arguments, num_warps, 2, options)


CONFIG = Config(32, 32, 8, 2)
# Sizes and strides of 1, and None, are constants of the code: the interpreter never makes them so.
SHAPES = [  # B, H, G, T, S, D, dtype, causal, window, dropout_p, packed
    (1, 1, 1, 1, 1, 1, torch.float16, False, None, 0.0, False),
    (1, 1, 1, 1, 1, 16, torch.bfloat16, False, 1, 0.9, True),
    (1, 2, 1, 1, 2, 16, torch.bfloat16, True, 0, 0.0, True),
    (2, 3, 1, 17, 1, 40, torch.bfloat16, True, None, 0.1, False),
]


def launches(B, H, G, T, S, D, dtype, causal, window, dropout_p, packed):
    """All kernels of one attention and its backward; columns lie T and S elements apart."""
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, out, d_out = (empty(B, heads, D, rows).mT for heads, rows in ((H, T), (G, S), (G, S), (H, T), (H, T)))
    lse, delta = empty(B, H, T, dtype=torch.float32), empty(B, H, T, dtype=torch.float32)
    seed = empty(dtype=torch.int64) if dropout_p else None
    ends = empty(2, dtype=torch.int32) if packed else None
    problem = Problem.of(q, k, 0.5, causal, window, dropout_p, seed, ends, ends, T, S)
    return (forward_launch(q, k, v, out, lse, problem, CONFIG), delta_launch(out, d_out, lse, delta, CONFIG),
            *backward_launches(d_out, q, k, v, lse, delta, q, k, v, problem, (CONFIG, CONFIG)))


@pytest.fixture(scope="module")
def reports():
    """All that is compiled here, by as few processes as it takes: one, and another after the one that dies."""
    cases = {
        "fine": product(), "unaligned": product("*bf16", "*bf16"), "before": product(target=("cuda", 80)),
        "spills": product(maxnreg=40, target=("cuda", 80)),
        "large": product("*fp32:16", "*fp32:16", N=128, num_warps=8, target=("cuda", 86)),
        "tma": Case("kernels_to_compile:copied", {"a_ptr": POINTER, "out_ptr": POINTER, "stride": "i64:16", "N": 64},
                    4, 2),
        "absent": product()._replace(kernel="kernels_to_compile:quotient"), "option": product(maxregs=40),
        **{f"launch {i}": Case.of(launch) for i, launch in enumerate(
            launch for shape in SHAPES for launch in launches(*shape))},
        "dies": product()._replace(kernel="kernels_to_compile:dies"), "after": product(N=32)}
    assert any(1 in case.arguments["q"][1:] for name, case in cases.items() if "q" in case.arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # a process that interprets can ask too
        return dict(zip(cases, compile_each(cases.values()), strict=True))


def test_sizes_of_one_compile(reports):
    found = [report for name, report in reports.items() if name.startswith("launch")]
    assert [report.name for report in found] == 4 * ["forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"]
    assert not any(report.spill_bytes for report in found)


@pytest.mark.parametrize(("name", "words"), [
    ("absent", "(?s)compiling kernels_to_compile:quotient failed: .*no attribute 'quotient'"),
    ("option", r"(?s)compile_kernel\(maxregs=…\): expected options that Triton knows.*'maxnreg'"),
    ("dies", "(?s)compiling kernels_to_compile:dies failed: exit status 3\n.*out of ideas")])
def test_one_that_does_not_compile_is_named_and_the_others_are_there(name, words, reports, monkeypatch):
    assert re.search(words, str(reports[name]))
    assert reports["after"].name == "product"
    monkeypatch.setattr(processes, "compile_each", lambda cases: [reports["fine"], reports[name]])
    with pytest.raises(RuntimeError, match=words):
        processes.compile_cases([])


def test_a_product_in_bf16_runs_on_warp_groups(reports):
    fine = reports["fine"]
    assert (fine.name, fine.warps) == ("product", 4) and fine.seconds > 0
    assert fine.instructions["HGMMA"] >= 4  # 64 × 64 by 16 at a time
    assert fine.instructions["HMMA"] == fine.instructions["LDL"] == fine.instructions["UTMALDG"] == 0
    assert 32 <= fine.registers <= 255 and fine.spill_bytes == fine.stack_bytes == 0
    assert 2 * 64 * 64 * 2 <= fine.shared_bytes < 32768  # both operands lie there
    assert fine.faults() == []


def test_instructions_are_those_that_cuobjdump_lists_of_one_kernel(reports, tmp_path):
    report, path = reports["spills"], tmp_path / "cubin"  # one of several kernels of its capability
    path.write_bytes(report.cubin)
    listing = subprocess.run([BIN / "cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", listing, re.MULTILINE)
    assert len(names) > 100 and Counter(names) == report.instructions


def test_gpus_before_have_products_of_one_warp(reports):
    assert reports["before"].instructions["HMMA"] and not reports["before"].instructions["HGMMA"]


def test_what_is_known_to_be_a_multiple_of_16_is_loaded_in_fewer_pieces(reports):
    assert reports["fine"].instructions["LDG"] * 4 <= reports["unaligned"].instructions["LDG"]


def test_too_few_registers_are_seen(reports):
    spills = reports["spills"]
    assert spills.registers <= 40 and spills.spill_bytes > 0 and spills.stack_bytes > 0
    assert spills.instructions["STL"] and spills.instructions["LDL"]
    assert f"spills {spills.spill_bytes} bytes with {spills.registers} registers" in spills.faults()[0]


def test_too_much_shared_memory_is_seen(reports):
    large = reports["large"]
    assert large.shared_bytes > large.shared_limit == 99 * 1024
    assert any(f"needs {large.shared_bytes} bytes of shared memory, there are 101376" in x for x in large.faults())


def test_tiles_by_the_tensor_memory_accelerator(reports):
    assert reports["tma"].instructions["UTMALDG"] and reports["tma"].instructions["UTMASTG"]
    assert not reports["tma"].instructions["LDG"]


def test_remarks_of_ptxas_are_faults(reports):
    remark = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert reports["fine"]._replace(warnings=(remark,)).faults() == [f"product: {remark}"]


def test_a_launch_becomes_a_case_whether_kernels_are_interpreted_or_not():
    q, lse = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, 64, device="meta")
    problem = Problem.of(q, q, 0.25, True, None, 0.0, None, None, None, 0, 0)
    case = Case.of(forward_launch(q, q, q, q, lse, problem, Config(32, 64, 4, 2)))
    assert (case.kernel, case.num_warps, case.num_stages) == ("refimpl.attention.triton_forward:forward_kernel", 4, 2)
    assert case.arguments["q"] == (POINTER, "i32:16", "i32:16", "i32:16", 1) and case.arguments["scale"] == "fp32"
    assert [case.arguments[name] for name in ("D", "BLOCK_M", "BLOCK_N")] == [16, 32, 64]


def test_arguments_as_a_launch_makes_them():
    assert as_launched(torch.empty(4, dtype=torch.bfloat16, device="meta")) == "*bf16:16"
    assert as_launched(torch.empty(64)[1:]) == "*fp32"
    assert [as_launched(x) for x in (1, 3, 48, 0, 2**31, -5, 0.5, None, True)] == [
        1, "i32", "i32:16", "i32:16", "i64:16", "i32", "fp32", None, True]
    assert [as_launched(x, specialize=False) for x in (1, 48, torch.empty(4), 0.5)] == ["i32", "i32", "*fp32", "fp32"]


def nothing(a, b):
    pass


def test_errors():
    with pytest.raises(RuntimeError, match="is a function: expected a function under triton.jit in a process without"):
        compile_kernel(test_errors, {}, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"target=\('cuda', 70\): expected \('cuda', capability\) with one of"):
        compile_kernel(test_errors, {}, num_warps=4, num_stages=2, target=("cuda", 70))
    kernel = triton.JITFunction(nothing)
    with pytest.raises(ValueError, match="b='i32:8': expected a type such as"):
        compile_kernel(kernel, {"a": "fp32", "b": "i32:8"}, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"arguments missing \['a'\], unknown \['c'\]: give each of \['a', 'b'\]"):
        compile_kernel(kernel, {"b": "i32", "c": 1}, num_warps=4, num_stages=2)
