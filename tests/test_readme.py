"""README and docs/ are true: examples run, links lead somewhere, figures are those of the records and closed forms."""

import ast
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.record import measurement
from refimpl import catalog, cli
from refimpl.attention import (
    attention_flops,
    block_sparse_attention_flops,
    delta_rule_bytes,
    delta_rule_flops,
    flash_attention_bytes,
    flash_attention_traffic,
    linformer_bytes,
    linformer_flops,
    linformer_parameters,
    longformer_mask,
    reference_attention_bytes,
    state_bytes,
    tiled_attention_bytes,
)
from refimpl.attention.kernels import configs
from refimpl.attention.kv_cache import DEEPSEEK, HEADS, LAYERS, gqa_cache_bytes, mla_cache_bytes
from refimpl.attention.native_sparse import native_sparse_bytes, native_sparse_flops
from refimpl.attention.selected_masks import apart, selected_mask
from refimpl.comm import FakeCommunicator, ring_traffic
from refimpl.common.ledger import human
from refimpl.context.closed_forms import attention_traffic, context_activation_bytes, idle_share
from refimpl.cross_entropy import chunked_cross_entropy_bytes, plain_cross_entropy_bytes
from refimpl.engine.closed_forms import axis_traffic, rank_bytes
from refimpl.engine.refused import bytes_sent
from refimpl.memory import korthikanti_terms
from refimpl.mesh import Mesh
from refimpl.mlp import mlp_bytes, plain_mlp_saved_bytes
from refimpl.model import GPT, GPTConfig
from refimpl.offload.closed_forms import cpu_adam_bytes, cpu_adam_traffic, host_store_traffic
from refimpl.pipeline import Costs, in_flight, schedule, simulate, validate
from refimpl.tensor import tensor_parallel
from refimpl.tensor.closed_forms import ON_ALL_RANKS, block_traffic
from refimpl.zero.bucket import buckets_of, default_bucket_bytes
from refimpl.zero.closed_forms import model_state_bytes, paper_bytes, step_traffic
from refimpl.zero.quantized import BlockCodec
from refimpl.zero.quantized.closed_forms import gather_bytes, reduce_bytes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import start_page  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()
TECHNIQUES = "".join(path.read_text() for path in PAGES if path.parent.name == "techniques")
OWN = (ROOT / "docs" / "your_own_code.md").read_text()
METER = (ROOT / "docs" / "meter.md").read_text()
LINKS = sorted({(path, link) for path in PAGES for link in re.findall(r"\]\(([^)#]+)", path.read_text())})


def test_readme_takes_three_minutes():
    assert len(README.split()) <= 1200


@pytest.mark.parametrize("page", [README, OWN], ids=["README", "your_own_code"])
def test_the_examples_run_as_written(capsys, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        (tmp_path / "example.py").write_text(example)
        runpy.run_path("example.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("peak on cpu, after ") and "optimizer state" in printed
    if page == OWN:
        assert printed.endswith(" s on the wire were waited for\n")
        assert (tmp_path / "checkpoint" / "manifest.json").exists() and (tmp_path / "overlap.png").stat().st_size


def test_the_estimate_is_the_one_that_is_printed(capsys):
    command, printed = re.search(r"```\n\$ refimpl (estimate .*?)\n(.*?)\n```", OWN, re.DOTALL).groups()
    cli.main(command.split())
    said = capsys.readouterr().out.splitlines()
    first, last = printed.split("\n…\n")
    first, last = first.splitlines(), last.splitlines()
    assert first == said[:len(first)] and last == said[-len(last):]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{page.name}: {link}" for page, link in LINKS])
def test_links_lead_somewhere(page, link):
    assert link.startswith("https://") or (page.parent / link).exists()


def test_every_notebook_has_a_row():
    table = (ROOT / "docs" / "techniques.md").read_text()
    rows = set(re.findall(r"\]\(../notebooks/([^)]+)\)", table + (ROOT / "docs" / "symptoms.md").read_text()))
    assert rows == {page.filename for page in catalog.pages()}
    assert f"one of the {sum(page.core for page in catalog.pages())} core pages" in table


def test_the_four_questions_are_those_of_the_start_page():
    groups = start_page.start()["groups"]
    assert re.findall(r"^\*\*(.*)\*\*$", README, re.MULTILINE) == [group["title"] for group in groups]
    for row in (row for group in groups for row in group["rows"]):
        first = row[1]
        line = start_page.symptom(row, lambda slug, first=first: start_page.in_readme(slug, slug == first), ", ")
        assert line in README


def test_a_technique_is_a_short_row_that_leads_to_its_figures():
    rows = re.findall(r"^\| \[(.*?)\]\(techniques/(\w+)\.md#([^)]+)\) \| (.*?) \| (.*?) \|", (
        ROOT / "docs" / "techniques.md").read_text(), re.MULTILINE)
    assert len(rows) == TECHNIQUES.count("\n## ") >= 39
    for name, file, anchor, saves, costs in rows:
        headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "techniques" / f"{file}.md").read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}
        assert len(f"{name} {saves} {costs}".split()) <= 25


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE) + re.findall(r"`make (\w+)`", README):
        assert f"\n{target}:" in makefile


def rows_of(bench, device="cpu"):
    return measurement(bench, device)["rows"]


def test_figures_of_the_meter_are_the_recorded_ones():
    rows = rows_of("meter")
    fp32 = next(r for r in rows if "peak" in r["what"] and "fp32, dropout 0.0" in r["what"])
    bf16 = next(r for r in rows if "peak" in r["what"] and "bf16, dropout 0.0" in r["what"])
    steps = [r["ratio"] for r in rows if r["what"].startswith("tracked step")]
    dry = [r for r in rows if r["what"].startswith("dry run") and r["unit"] == "s"]
    seconds = {r["what"].split()[3].rstrip(","): r["value"] for r in dry}
    assert f"{fp32['peer_value'] - fp32['value']} bytes of {fp32['peer_value'] / 1e6:.0f} MB" in METER
    text = " ".join(METER.split())
    programs = [r for r in rows if "net" in r]
    near = [r for r in programs if abs(r["ratio"] - 1) <= 0.005]
    assert f"on {len(programs)} programs of transformers, timm and peft within 0.5 % in {len(near)} of them" in text
    assert f"In the other {len(programs) - len(near)} kernels take" in text
    assert all(r["notes"] and r["ratio"] < 1 for r in programs if r not in near)
    assert {r["net"] for r in programs} == {0}
    assert f"bf16 products; {100 - 100 * bf16['ratio']:.1f} % in that step in bf16" in text
    fp32_step, bf16_step, tiny, *others = (f"{ratio:.1f}" for ratio in steps)
    assert f"by a factor of {fp32_step} in fp32 and {bf16_step} in bf16, and a tiny model's by {tiny}" in text
    assert f"four of transformers' models of that size by {min(others)} to {max(others)}" in text
    dry = f"{seconds['gpt3-175b']:.0f} s for GPT-3 175B, {seconds['llama2-7b']:.0f} s for LLaMA-2-7B"
    assert dry in readme_row("dry run")


def readme_row(start):
    """The figures of the technique whose heading begins so, in one line."""
    (section,) = re.findall(rf"^## {re.escape(start)}.*?(?=^## |\Z)", TECHNIQUES, re.MULTILINE | re.DOTALL)
    return " ".join(section.split())


def test_figures_of_mixed_precision_are_the_recorded_ones():
    line, rows = readme_row("mixed precision"), {row["what"]: row for row in rows_of("precision")}
    peak, states = rows["peak of bf16 autocast"], rows["model states of bf16 autocast"]
    step = next(row for what, row in rows.items() if what.startswith("step of bf16 autocast"))
    activations = 1 - peak["items"]["activations"] / peak["peer_items"]["activations"]
    assert f"{100 * activations:.0f} % of a small GPT's activations and {100 - 100 * peak['ratio']:.0f} %" in line
    assert states["ratio"] == 1 and f"takes {step['ratio']:.2f} of fp32's" in line


def test_figures_of_accumulation_are_the_recorded_ones():
    line = readme_row("gradient accumulation")
    ratios = {row["what"]: row["ratio"] for row in rows_of("accumulation") if row["peer"] == "the whole batch at once"}
    for parts in (2, 8):
        peak = ratios[f"peak above the start, {parts} micro-batches, fp32"]
        assert f"{100 - 100 * peak:.0f} % in {parts}" in line
    fp32, bf16 = (ratios[f"step in 8 micro-batches, {dtype}"] for dtype in ("fp32", "bf16"))
    assert f"in 8 parts {fp32:.2f} times the time in fp32, {bf16:.2f} in bf16" in line


def test_figures_of_recomputation_are_the_recorded_ones():
    rows = {row["what"]: row for row in rows_of("checkpointing")}
    line = readme_row("recompute every block")
    assert f"{1 - rows['peak: every block']['ratio']:.0%}".replace("%", " % of the peak") in line
    assert f"{rows['time: every block']['ratio'] - 1:.0%}".replace("%", " % of the step's time on a CPU") in line


def test_figures_of_a_head_without_logits_are_the_closed_forms():
    line = readme_row("the loss without logits")
    for N, V, C, dtype, name in ((8192, 128256, 4096, torch.bfloat16, "Llama-3-8B"),
                                 (8192, 50257, 768, torch.float32, "GPT-2 small")):
        logits, chunks = (form(N, V, C, dtype).peak / 1e9
                          for form in (plain_cross_entropy_bytes, chunked_cross_entropy_bytes))
        assert f"{logits:.2f} " in line and f"become {chunks:.2f} for {name}" in line


def test_figures_of_an_mlp_without_its_hidden_layer_are_the_closed_forms():
    line = readme_row("an MLP that keeps its input")
    all_layers = 32 * plain_mlp_saved_bytes(8192, 14336, torch.bfloat16, activation="swiglu")
    assert f"Llama-3-8B's {all_layers / 1e9:.1f} GB" in line
    assert mlp_bytes(8192, 4096, 14336, torch.bfloat16, activation="swiglu").saved == 0


def test_figures_of_smaller_activations_are_the_recorded_ones():
    line, rows = readme_row("masks in one bit"), {row["what"]: row["ratio"] for row in rows_of("activations")}
    off = {row["what"]: row["value"] for row in rows_of("activations") if row["what"].startswith("gradient")}
    peak, kept, time = ({way: rows[f"{what}: {way}, fp32, dropout 0.0"] for way in ("int8", "bf16")}
                        for what in ("peak", "kept", "time"))
    assert f"{100 - 100 * kept['int8']:.0f} % of an fp32 GPT's activations" in line
    assert f"{100 - 100 * peak['int8']:.0f} % of its step's peak (bf16: {100 - 100 * peak['bf16']:.0f} %" in line
    assert f"{100 * time['int8'] - 100:.0f} % of the time on a CPU (bf16: {100 * time['bf16'] - 100:.0f} %)" in line
    int8, bf16 = (100 * off[f"gradient's error: {way}"] for way in ("int8", "bf16"))
    assert f"off by {int8:.1f} % (bf16: {bf16:.1f} %)" in line and off["gradient's error: lossless"] == 0


def test_figures_of_long_sequences_are_the_recorded_ones():
    line, rows = readme_row("a long sequence in chunks"), {row["what"]: row["ratio"] for row in rows_of("sequences")}
    fp32, bf16 = (rows[f"step in 8 chunks, {dtype}"] for dtype in ("fp32", "bf16"))
    peak = rows["peak above the start, 8 chunks, fp32"]
    assert f"{100 - 100 * peak:.0f} % of what a step takes above weights, in 8 chunks" in line
    assert f"in 8 chunks {fp32:.2f} times the time in fp32, {bf16:.2f} in bf16" in line


def test_figures_of_attention_in_tiles_are_those_of_the_closed_forms():
    line, saved = readme_row("attention in tiles"), {}
    for T in (1024, 65536):
        shapes = (1, 12, T, 64), (1, 12, T, 64)
        dense, tiled = (form(*shapes, causal=True) for form in (reference_attention_bytes, tiled_attention_bytes))
        saved[T] = 100 - 100 * tiled.peak / dense.peak
        assert tiled.kept == 4 * 12 * T * 64 + 4 * 12 * T
    assert f"{saved[1024]:.0f} % of attention's peak at 1,024 tokens, {saved[65536]:.1f} % at 65,536" in line
    flops = attention_flops(*shapes, causal=True)
    share = (flops.forward + flops.backward_recomputing) / (flops.forward + flops.backward)
    assert f"{share:.2f} times attention's FLOPs" in line
    short, long = (next(row["ratio"] for row in rows_of("attention") if row["peer"] == "softmax_attention"
                        and row["what"] == f"step: tiled_attention, {T:,} tokens") for T in (1024, 4096))
    assert f"{short:.2f} times the dense step's time at 1,024 tokens and {long:.2f} at 4,096 (fp32, causal)" in line


def test_figures_of_lists_of_blocks_are_those_of_the_closed_forms():
    line, shape = readme_row("lists of blocks"), (1, 1, 65536, 64)
    mask = longformer_mask(65536, 1024, causal=True)
    share = block_sparse_attention_flops(shape, shape, mask).forward / attention_flops(shape, shape).forward
    assert f"with a causal window of 1,024 {100 - 100 * share:.1f} % of the FLOPs" in line
    assert f"{mask.nbytes / 1e3:.0f} KB of lists in place of {65536**2 / 1e9:.1f} GB of booleans" in line
    assert f"{100 * mask.tile_density:.2f} % of the blocks for {100 * mask.density:.2f} % of the pairs" in line


def test_figures_of_linear_attention_are_those_of_the_closed_forms():
    line, shape = readme_row("linear attention"), (1, 16, 65536, 128)
    state = state_bytes(layers=1, heads=16, head_dim=128)
    token = gqa_cache_bytes(layers=1, kv_heads=16, head_dim=128)
    assert f"a state of {state / 1e6:.2f} MB a layer" in line
    assert f"{token:,} bytes a token: as much at {state // token} tokens" in line
    share = delta_rule_flops(shape, shape) / attention_flops(shape, shape, causal=True).forward
    assert f"Of attention over 65,536 tokens {100 - 100 * share:.2f} % of the FLOPs" in line
    peaks = [delta_rule_bytes(shape, shape, torch.bfloat16, kernel="triton").peak,
             flash_attention_bytes(shape, shape, torch.bfloat16, causal=True).peak]
    assert f"{peaks[0] / peaks[1]:.2f} times the peak of FlashAttention" in line


def test_figures_of_native_sparse_attention_are_those_of_the_closed_forms():
    line, (T, block, top_k), shapes = readme_row("native sparse attention"), (65536, 64, 16), (
        (1, 16, 65536, 64), (1, 1, 65536, 64))
    dense = attention_flops(*shapes, causal=True).forward
    own = torch.arange(T) // block
    spread = [own * n // (top_k - 2) for n in range(1, top_k - 2)]  # beside the first, its own and the one before
    picks = torch.stack([0 * own, own - 1, own, *spread], -1).sort(-1).values
    same = torch.nn.functional.pad(picks[:, 1:] == picks[:, :-1], (1, 0))
    agreed = selected_mask(picks.masked_fill(same, -1).int()[None, None], 16, block)
    share, most = (native_sparse_flops(*shapes, mask, 512).forward / dense
                   for mask in (agreed, apart((1, 1, T, top_k), 16, block)))
    assert f"{100 - 100 * share:.1f} % of the FLOPs where all queries" in line
    assert most > 1 and "and nothing where no two of them agree" in line
    assert f"picks takes {agreed.nbytes / 1e3:.0f} KB" in line
    peaks = [native_sparse_bytes(*shapes, agreed, 512, torch.bfloat16).peak,
             flash_attention_bytes(*shapes, torch.bfloat16, causal=True).peak]
    assert f"{peaks[0] / peaks[1]:.2f} times the peak of FlashAttention" in line


def test_figures_of_linformer_are_those_of_the_closed_forms():
    line, shape = readme_row("Linformer"), (1, 16, 65536, 64)
    share = linformer_flops(shape, shape, 256).forward / attention_flops(shape, shape).forward
    assert f"with k = 256 {100 - 100 * share:.1f} % of the FLOPs" in line
    flash, ours = (flash_attention_bytes(shape, shape, torch.bfloat16).peak,
                   linformer_bytes(shape, shape, 256, torch.bfloat16, share="kv").peak)
    assert f"which takes {100 - 100 * flash / ours:.0f} % less" in line
    assert f"{linformer_parameters(65536, 16, 256, 'kv') / 1e6:.1f} million numbers a layer" in line


def test_figures_of_flash_attention_are_those_of_the_closed_forms():
    line = readme_row("FlashAttention in Triton kernels")
    shapes = (1, 12, 1024, 64), (1, 12, 1024, 64)
    dense, flash = (form(*shapes, causal=True) for form in (reference_attention_bytes, flash_attention_bytes))
    assert f"{100 - 100 * flash.peak / dense.peak:.0f} % of attention's peak at 1,024 tokens" in line
    shape, e = (1, 16, 8192, 128), 2
    tile = {"forward": configs.look_up("forward", "datacenter", e, 128)}
    asked = sum(flash_attention_traffic(shape, shape, torch.bfloat16, configs=tile)["forward"])
    once = 4 * e * 16 * 8192 * 128
    matrix = once + 4 * e * 16 * 8192**2  # S written and read, P written and read
    assert (f"{human(matrix)} at the least with the T × S matrix, {human(asked)} as the kernel's programs ask, "
            f"{human(once).replace('.0', '')} each byte once") in line
    flops = attention_flops(shape, shape)
    assert flops.backward_recomputing // (flops.forward // 2) == 5 and "in place of five" in line


def test_figures_of_attention_of_today_are_those_of_the_closed_forms():
    line = readme_row("hooks on scores and sinks")
    mask, ids = 8 * 32768**2, 8 * 32768 * 8
    assert f"{mask / 1e9:.1f} GB of booleans for 8 texts of 32,768 tokens" in line and f"{ids / 1e6:.1f} MB" in line
    line = readme_row("MLA")
    own = mla_cache_bytes(layers=LAYERS["DeepSeek-V3"], latent=DEEPSEEK.latent, rope=DEEPSEEK.rope)
    mha = gqa_cache_bytes(layers=LAYERS["DeepSeek-V3"], kv_heads=HEADS, head_dim=128)
    assert f"all but {DEEPSEEK.latent + DEEPSEEK.rope} numbers a token and layer: {own:,} bytes a token" in line
    assert f"MHA would keep {mha:,}" in line


def test_figures_of_data_parallelism_are_those_of_the_closed_forms():
    line, config = readme_row("data parallelism"), GPTConfig.named("llama2-7b")
    model, count = GPT(config, device="meta"), config.parameter_count()
    one, many = (model_state_bytes(model, N, stage=0).total for N in (1, 1024))
    assert f"{one / count:.0f} bytes a parameter (fp32, AdamW) on 1,024 ranks as on one, {human(one)}" in line
    assert f"{many / count:.0f} bytes" == f"{one / count:.0f} bytes" and human(many) == human(one)
    assert f"{ring_traffic('all_reduce', 4 * count, 8) / (4 * count):.2f} at 8 ranks" in line


def test_figures_of_zero_1_and_2_are_those_of_the_closed_forms():
    first, second = readme_row("ZeRO-1"), readme_row("ZeRO-2")
    fp32, bf16 = ([paper_bytes(1, 4, stage, *each) for stage in (0, 1, 2)] for each in ((4, 4, 8), (2, 2, 12)))
    assert f"of {fp32[0]:g} bytes a parameter {fp32[1]:g} are left on 4 ranks in fp32, {bf16[1]:g} in bf16" in first
    assert f"on 4 ranks {fp32[2]:g} bytes are left in fp32, {bf16[2]:g} in bf16" in second
    assert f"on 64 GPUs {paper_bytes(7.5e9, 64, 2) / 1e9:.1f} GB of {paper_bytes(7.5e9, 64, 0) / 1e9:.0f}" in second
    model = GPT(GPTConfig.named("gpt2"), device="meta")
    assert step_traffic(model, 8, 0).total == step_traffic(model, 8, 1).total and "not a byte on the wire" in first
    more = step_traffic(model, 8, 2, micro_batches=4).total / step_traffic(model, 8, 0, micro_batches=4).total
    assert f"with 4 micro-batches {more:.1f} times the traffic" in second


def test_figures_of_zero_3_are_those_of_the_closed_forms_and_the_record():
    line, rows = readme_row("ZeRO-3"), {row["what"]: row["ratio"] for row in rows_of("zero")}
    whole, shards = (paper_bytes(1, 4, stage, 4, 4, 8) for stage in (0, 3))
    assert f"on 4 ranks {shards:g} bytes a parameter are left of {whole:g}" in line
    llama = GPT(GPTConfig.named("llama2-7b"), device="meta", dtype=torch.bfloat16)
    second, third = (human(model_state_bytes(llama, 1024, stage).total) for stage in (2, 3))
    assert f"of LLaMA-2-7B on 1,024 ranks {third}, where stage 2 has {second} (bf16)" in line
    more = step_traffic(llama, 1024, 3).total / step_traffic(llama, 1024, 2).total
    assert f"{more:.1f} times the traffic" in line
    peak, time = rows["peak of a step, Zero3"], rows["step, Zero3"]
    assert f"on a CPU {time:.2f} of FSDP2's time, at {peak:.2f} of its peak" in line


def gpt3_block(N, by_tokens=False):
    """GB of a block of GPT-3 on a rank of N: (states, activations in Korthikanti et al.'s terms), and the times that it
    sends its input's bytes."""
    config, b, s = replace(GPTConfig.named("gpt3-175b"), layers=1), 1, 2048
    block = tensor_parallel(GPT(config, device="meta"), FakeCommunicator(0, N)).blocks[0]
    kept = sum(nbytes if term in ON_ALL_RANKS and not by_tokens else nbytes / N
               for term, nbytes in korthikanti_terms(config, b, s).items())
    sent = block_traffic(config, b, s, N, 2, by_tokens=by_tokens).total / (2 * b * s * config.hidden)
    return 16 * sum(p.numel() for p in block.parameters()) / 1e9, kept / 1e9, sent


def test_figures_of_tensor_parallelism_are_those_of_the_closed_forms_and_the_record():
    line, rows = readme_row("tensor parallelism"), {row["what"]: row["ratio"] for row in rows_of("tensor_parallel")}
    (whole, all_kept, none), (states, kept, sent) = gpt3_block(1), gpt3_block(8)
    assert f"on 8 ranks {states:.1f} GB of states are left of {whole:.1f}" in line and none == 0
    assert f"and {kept:.2f} GB of activations of {all_kept:.2f} (16 bits, 2,048 tokens)" in line
    assert f"sends {sent:g} times the input's bytes on 8 ranks" in line
    time, peak = rows["step, tensor_parallel"], rows["peak of a step, tensor_parallel"]
    assert f"{time:.2f} of the time of `torch.distributed.tensor.parallel`, at {peak:.2f} of its peak" in line


def test_figures_of_sequence_parallelism_are_those_of_the_closed_forms_and_the_record():
    line = readme_row("Megatron's sequence parallelism")
    rows = {row["what"]: row["ratio"] for row in rows_of("tensor_parallel")}
    (_, whole, _), (_, split, sent), (_, kept, more) = gpt3_block(1), gpt3_block(8), gpt3_block(8, by_tokens=True)
    assert (f"{kept:.2f} GB are left on 8 ranks, where tensor parallelism has {split:.2f} and one GPU {whole:.2f}"
            in line)
    assert f"{more / sent:.2f} times tensor parallelism's traffic" in line
    time, peak = rows["step, sequence_parallel"], rows["peak of a step, sequence_parallel"]
    assert (f"{time:.2f} of the time of `torch.distributed.tensor.parallel` with `SequenceParallel`, at {peak:.2f} of "
            "its peak") in line


def test_figures_of_context_parallelism_are_those_of_the_closed_forms_and_the_record():
    line, N = readme_row("context parallelism"), 8
    ratios = {row["what"]: row["ratio"] for row in rows_of("context_parallel")}
    assert f"on four ranks {ratios['peak of a step, ring, zig-zag']:.2f} of its peak is left" in line
    llama = GPTConfig(128256, 2**20, 32, 4096, 32, kv_heads=8, mlp_hidden=14336, norm="rmsnorm", activation="swiglu",
                      positions="rotary", bias=False, tied=False)
    kept, whole = (context_activation_bytes(llama, 1, 2**20 // n, n, "ring", torch.bfloat16) / 1e9 for n in (64, 1))
    assert f"{kept:,.0f} GB of activations on each of 64 ranks, where one device would need {whole:,.0f} (bf16" in line
    sent = sum(each.total for each in attention_traffic("ring", 1, 16, 4, 2, 8, N))
    assert sent == (3 * N - 2) * 2 * 4 * 16 * 2 * 8 and "3N − 2 times in forward and backward (fp32)" in line
    assert idle_share(N, "plain") == (N - 1) / (2 * N - 1) and idle_share(N, "zig-zag") == 0
    assert "in plain order waits (N − 1)/(2N − 1) of the time, in zig-zag order not" in line


def test_figures_of_pipeline_parallelism_are_those_of_the_simulator():
    line, p, m = readme_row("pipeline parallelism"), 4, 32
    (first, *_, last), gpipe = validate(schedule("1f1b", p, m)), validate(schedule("gpipe", p, m))
    assert (f"of {m} micro-batches on {p} ranks rank 0 holds {first.peak}, the last one {last.peak} (all forwards "
            f"first: {gpipe[0].peak})") in line
    step = simulate(schedule("1f1b", p, m), Costs(1, 0.5, 0.5))
    share = 1 - 2 * m / step.step_time
    assert abs(share - (p - 1) / (m + p - 1)) < 1e-12 and f"{share:.1%} at {m} on {p} ranks".replace("%", " %") in line
    config = GPTConfig.named("gpt3-175b")
    sent = block_traffic(config, 1, 2048, 8, 2).total / (2048 * config.hidden * 2)
    assert f"sends {sent:g} times these in each block (8 ranks)" in line


def test_figures_of_three_dimensions_are_those_of_the_closed_forms():
    line, config, mesh, m = readme_row("three dimensions together"), GPTConfig.named("gpt3-175b"), Mesh(8 * 4, 8, 4), 8
    assert mesh == Mesh(tp=8, pp=4, dp=32) and mesh.world_size == 1024
    given = {"dtype": torch.bfloat16, "recompute": True}
    held = max(rank_bytes(config, mesh, pp, m, m, **given).total for pp in range(4))
    whole = 16 * config.parameter_count()
    assert f"{held / 1e9:.1f} GB of states and kept activations are left on a rank, of {whole / 1e9:,.0f} GB" in line
    sent = axis_traffic(config, mesh, 1, m, m, **given)
    assert "sends {:.1f} GB a step over tp, {:.1f} over pp and {:.1f} over dp".format(
        *(sent[axis] / 1e9 for axis in ("tp", "pp", "dp"))) in line
    times = [bytes_sent(stage, m, 32, 3200) / bytes_sent(1, m, 32, 3200) for stage in (2, 3)]
    assert "send {:g} and {:g} times what ZeRO-1 does with 8 micro-batches".format(*times) in line


def test_figures_of_zero_bubble_schedules_are_those_of_the_simulator():
    line, p, m, idle = readme_row("zero-bubble schedules"), 4, 8, {}
    for costs in ((1, 1, 1), (4, 5, 3)):
        for name in ("1f1b", "zb-h1", "zb-v"):
            built = schedule(name, p, m)
            share = p / built.stages
            idle[name] = f"{max(simulate(built, Costs(*(each * share for each in costs))).idle):g}"
            if name != "1f1b":
                assert [count.peak * share for count in validate(built)] == [p] * p
        if costs == (1, 1, 1):
            assert (f"of {idle['1f1b']} units on {p} ranks {idle['zb-h1']} are left (ZB-H1), or {idle['zb-v']} (ZB-V), "
                    "where forward and both parts of backward take 1 each") in line
    assert f"at 4 : 5 : 3, of {idle['1f1b']} units {idle['zb-h1']}, or {idle['zb-v']}." in line
    assert [in_flight("1f1b", p, m, r) for r in range(p)] == [p - r for r in range(p)]
    assert in_flight("zb-h2", p, m) == 2 * p - 1 and "ZB-H2 holds 2p − 1" in line


def test_figures_of_the_allocator_are_the_recorded_ones():
    rows = {row["what"]: row for row in rows_of("allocator")}
    line, varying = readme_row("expandable segments"), "sequences of varying length"
    kept = {name: rows[f"reserved, {varying}, {name}"]["ratio"]
            for name in ("PyTorch's default", "expandable_segments:True", "one pool, best_fit")}
    default, expandable, pool = (f"{ratio:.2f}" for ratio in kept.values())
    assert f"varying length {default} times the live bytes become {expandable} with" in line and expandable == pool
    block = rows["block, 10000 live, best_fit"]["paired"]
    assert f"block takes {block:.1f} times as long as `torch.empty` with 10,000 live" in line
    seconds = rows["replay of 1,000,000 events"]["value"]
    assert "a million events take seconds" in readme_row("reading the allocator") and 1 < seconds < 20


def test_figures_of_static_plans_are_the_recorded_ones():
    rows = {row["what"]: row for row in rows_of("static_plan")}
    line, problems = readme_row("static memory plans"), readme_row("a solver for plans")
    caching, plans = ([row["ratio"] for what, row in rows.items() if what.startswith(kind)]
                      for kind in ("caching, ", "plan, "))
    assert len(plans) == len(caching) == 4 and max(plans) <= 1.005
    assert f"{min(caching):.2f} to {max(caching):.2f} times the live bytes become {max(plans):.4f} at most" in line
    assert f"on a CPU {rows['step in its arena']['paired']:.2f} of the step's time" in line
    outside = rows["bytes outside of the arena"]
    assert outside["value"] <= outside["peer_value"] and f"{outside['value'] / 1e6:.1f} MB" in line
    assert f"an arena of {outside['arena'] / 1e6:.0f} MB" in line
    greedy = [row["ratio"] for what, row in rows.items() if what.endswith(", greedy")]
    solved = [row for what, row in rows.items() if what.endswith(", search") and row["value"]]
    words = {5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}
    assert len(greedy) == 11 and f"{words[len(solved)]} of MiniMalloc's eleven problems" in problems
    assert f"{min(greedy):.2f} to {max(greedy):.2f} times" in problems


def test_figures_of_compression_are_the_recorded_ones():
    line, rows = readme_row("compressed gradients"), {row["what"]: row for row in rows_of("compression")}
    loss = {name: f"{rows[f'loss after 250 steps, {name}, error feedback']['ratio']:.3f}"
            for name in ("topk", "threshold", "powersgd")}
    without = rows["loss after 250 steps, topk, no error feedback"]["ratio"]
    assert (f"the loss is {loss['topk']} times that of whole gradients (threshold {loss['threshold']}, PowerSGD "
            f"{loss['powersgd']}; without error feedback {without:.3f})") in line
    assert f"takes {rows['reduction over 10 MB/s, topk']['paired']:.2f} of the time" in line
    assert rows["bytes of gradients in a step, topk"]["ratio"] == pytest.approx(0.1, abs=1e-3)
    assert "a tenth of the gradients' bytes is sent" in line and "at 5 %" in line
    two, ring = (rows[f"all_reduce of 2 MB, {way}"]["value"] for way in ("two levels", "ring"))
    assert f"2 MB take {two / ring:.2f} of a ring's time on 4 ranks" in readme_row("`all_reduce` on two levels")


def test_figures_of_quantised_zero_are_those_of_the_closed_forms():
    line, n = readme_row("quantised ZeRO-3, in blocks of int8"), 2**20
    int8, int4 = BlockCodec(), BlockCodec(bits=4)
    assert (f"{int8.payload_bytes(n) / n:.3f} bytes for 4 ({int4.payload_bytes(n) / n:.3f} in 4 bits)" in line
            and f"block of {int8.block} at most" in line)
    assert gather_bytes(int8, n, 4) == 4 * int8.payload_bytes(n)
    assert reduce_bytes(int8, n, 4)["in flight"] == 2 * gather_bytes(int8, n, 4) and "twice for gradients" in line


def test_figures_of_offload_are_those_of_the_closed_forms():
    line = readme_row("offload to host memory")
    with torch.device("meta"):
        model = GPT(GPTConfig.named("llama2-7b"), dtype=torch.bfloat16)
    named = list(model.named_parameters())
    buckets = buckets_of(named, 1, default_bucket_bytes(named, 2))
    form, elements = cpu_adam_bytes(buckets, 2), sum(bucket.shard_numel for bucket in buckets)
    device = (sum(bucket.nbytes for bucket in buckets) + form["device"].total) / 1e9
    assert f"{device:.1f} GB are left on the device, and {form['host'] / 1e9:.1f} GB are on the host" in line
    each = {name: (traffic["to host"] / elements, traffic["to device"] / elements) for name, traffic in (
        ("store", host_store_traffic(buckets, 2)), ("update", cpu_adam_traffic(buckets, 2)))}
    assert each == {"store": (14, 14), "update": (2, 2)}
    assert "14 bytes a parameter each way in a step with a `HostStore` (ZeRO-2), 2 with `CPUAdam`" in line


LEAN = "gradients as views of buckets"


@pytest.mark.parametrize(("start", "stage", "text"), [
    ("data parallelism", "DataParallel", "{time:.2f} times DDP's time, at {peak:.2f} of its peak ({lean:.2f} where"),
    ("ZeRO-1", "Zero1", "{time:.2f} of the time of `ZeroRedundancyOptimizer` with DDP, at {peak:.2f} of its peak "
                        "({lean:.2f} where"),
    ("ZeRO-2", "Zero2", "{time:.2f} of the time of `ZeroRedundancyOptimizer` with DDP, at {peak:.2f} of its peak "
                        "({lean:.2f} with views")])
def test_figures_beside_pytorchs_own_are_the_recorded_ones(start, stage, text):
    ratios = {(row["what"], LEAN in row["peer"]): row["ratio"] for row in rows_of("zero")}
    peak, lean = (ratios[f"peak of a step, {stage}", views] for views in (False, True))
    assert "on a CPU " + text.format(time=ratios[f"step, {stage}", False], peak=peak, lean=lean) in readme_row(start)


def test_the_rate_of_reduce_scatter_is_the_recorded_one():
    rates = {row["what"]: row["value"] for row in rows_of("comm") if row["peer"] == "at least"}
    two, four = (rates[f"reduce_scatter on {N} ranks, of torch.distributed's rate"] for N in (2, 4))
    assert f"a reduce_scatter at {two:.1f} to {four:.1f} times the rate" in " ".join(OWN.split())


def test_the_places_to_begin_with_are_where_it_says():
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Where to begin")[2].partition("\n## ")[0]
    named = re.findall(r"\]\(../(refimpl/[\w/]+\.py)\), `([\w.]+)`", section)
    assert len(named) == 8
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert {*name.split(".")} <= found, (path, name)
