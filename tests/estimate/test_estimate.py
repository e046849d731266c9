"""An estimate is what a tracker reads of the real step with the same options, to the byte and by category."""

import json
import time
from pathlib import Path

import pytest
import torch
from estimate_kit import as_read

from refimpl import memory
from refimpl.attention import longformer_mask
from refimpl.comm import launch
from refimpl.estimate import Options, estimate
from refimpl.estimate import tracked_step as step
from refimpl.zero import DataParallel

PLAIN = [
    ("gpt", {"precision": "autocast", "recompute": True}),
    ("gemma", {"precision": "bf16", "optimizer": "adamw-fused"}),
    ("gpt", {"precision": "bf16-master", "optimizer": "momentum"}), ("regression", {"batch": 64, "optimizer": "sgd"}),
    ("gpt2", {"attention": "eager", "recompute": True, "optimizer": "adam"}), ("llama", {"precision": "bf16"}),
    ("masked", {"batch": 2}), ("classifier", {"batch": 3, "sequence": 16}), ("t5", {"batch": 2, "sequence": 16}),
    ("gpt", {"window": 5, "global_tokens": 2}), ("llama", {"window": 3, "batch": 2, "recompute": True}),
    ("whisper", {"batch": 2, "precision": "bf16"}), ("vit", {"batch": 4, "precision": "autocast"})]
STATE = 5056  # bytes of the CPU generator's state
ON_RANKS = [(name, {"zero": zero, "gpus": 2, "batch": 2, "precision": "bf16" if name == "llama" else "fp32"})
            for name in ("gpt", "gpt2", "llama") for zero in range(4)]
ON_RANKS += [("regression", {"zero": zero, "gpus": 2, "batch": 2, "optimizer": optimizer})
             for zero, optimizer in ((1, "adamw"), (2, "momentum"), (3, "adam"))]


@pytest.fixture(scope="module")
def ranks(names):
    """What two real ranks read: of each case (of each rank)."""
    return list(zip(*launch(as_read, 2, [(names[name], options) for name, options in ON_RANKS]), strict=True))


def said(found):
    return found.peak, found.phases, found.resting


@pytest.mark.parametrize(("name", "options"), PLAIN)
def test_a_loop_on_one_device(names, name, options):
    found = estimate(names[name], gpu="cpu", **options)
    assert said(found) == as_read(None, [(names[name], options)])[0]
    assert found.peak == found.phases[found.phase] and found.peak.total <= found.reserved
    assert found.gpu is found.fits is None


def test_states_of_random_numbers_are_what_a_recomputed_dropout_keeps_beside(names):
    """Fake tensors draw no numbers, so that a dry run keeps no state of the generator: the bound says how much."""
    options = {"precision": "bf16", "recompute": True}
    found = estimate(names["gemma"], gpu="cpu", **options)
    _, phases, _ = as_read(None, [(names["gemma"], options)])[0]
    more = phases["backward"].total - found.phases["backward"].total
    assert 0 < more <= (2 + 1) * STATE and more % STATE == 0 and any("5,056" in each for each in found.bounded)


@pytest.mark.parametrize("case", range(len(ON_RANKS)), ids=[f"{name}, zero {o['zero']}" for name, o in ON_RANKS])
def test_two_ranks(names, ranks, case):
    """Rank 0's own bytes; and how much more another one holds, by the counters of its pieces."""
    name, options = ON_RANKS[case]
    found, (first, second) = estimate(names[name], gpu="cpu", **options), ranks[case]
    assert said(found) == first and max(second[0].total - first[0].total, 0) == found.elsewhere


def test_an_estimate_that_shards_nothing_is_seen(names, ranks, monkeypatch):
    """The mutant: data parallelism in the place of stage 1, which shards least."""
    monkeypatch.setattr(step, "ENGINES", (DataParallel,) * 4)
    (name, options), read = ON_RANKS[1], ranks[1][0]
    assert options["zero"] == 1 and said(estimate(names[name], gpu="cpu", **options)) != read


def test_a_first_step_would_not_do(names, monkeypatch):
    """The mutant: the first step is tracked, in whose backward there are no optimizer states."""
    found = estimate(names["gpt"])
    whole, calls = step._PlainLoop.step, []
    def second(self, args, kwargs):
        calls.append(self)
        if len(calls) > 1:
            whole(self, args, kwargs)
    monkeypatch.setattr(step._PlainLoop, "step", second)
    first = memory.dry_run(lambda: step.train(None, names["gpt"], Options())).result.trace
    assert first.peak_moment("backward").ledger["optimizer state"] == 0 < found.phases["backward"]["optimizer state"]


def test_llama_3_8b_in_seconds():
    """Processor time of a machine that does other things, too: a bound against what looks at every event again."""
    began = time.process_time()
    found = estimate("llama3-8b", sequence=512, precision="bf16", zero=3, gpus=64, gpu="h100-sxm")
    assert time.process_time() - began < 60 and found.parameters == 8_030_261_248 and found.fits
    shard = 4 + 8  # bytes of fp32 masters and two moments
    assert found.peak["optimizer state"] == pytest.approx(shard * found.parameters / 64, rel=0.001)


@pytest.mark.parametrize(("model", "gpu", "precision", "kernel"), [
    ("llama", None, "bf16", "cuDNN"), ("gpt2", "h100-sxm", "autocast", "flash"), ("llama", "a100-80", "bf16", "flash"),
    ("gpt2", "t4", "fp32", "efficient"), ("gpt2", "t4", "bf16", "efficient"), ("llama", "mi300x", "bf16", "cuDNN")])
def test_the_kernel_of_attention_is_the_gpus_and_is_said(names, model, gpu, precision, kernel):
    found = estimate(names[model], gpu=gpu, precision=precision)
    whose = gpu if gpu in ("a100-80", "t4") else "h100-sxm"  # of an AMD GPU no kernels are known
    assert f"kernels of {whose}, in PyTorch {torch.__version__.partition('+')[0]}" in found.assumed
    assert f"attention: the {kernel} kernel, as PyTorch takes it on {whose}" in found.assumed


def test_a_window_runs_by_the_kernels_of_block_sparse_attention_on_a_gpu(names):
    """They keep an output, its logsumexp, and the lists, once for all layers: no scores, and no tiles."""
    found, wide, dense = (estimate(names["llama"], gpu="h100-sxm", **options) for options in (
        {"window": 8, "global_tokens": 2}, {"window": 31}, {}))
    assert "attention: block_sparse_attention, a window of 8 tokens and 2 that all see" in found.assumed
    assert not any("block_sparse" in each for each in dense.assumed)
    totals = [each.phases["forward"].total for each in (found, wide, dense)]
    in_lists = [longformer_mask(32, *each, causal=True).nbytes for each in ((8, 2), (31,))]
    assert totals[0] - totals[1] == in_lists[0] - in_lists[1] and max(totals[:2]) < totals[2]
    on_a_cpu = estimate(names["llama"], gpu="cpu", window=8, global_tokens=2)
    assert on_a_cpu.phases["forward"].total > totals[0], "there tiles are in memory"


def test_dropout_keeps_masks_of_a_byte_on_a_gpu(names):
    """GPT-2's own dropout of 0.1: the masks of a CPU are of the tensors' type, and attention keeps its scores there."""
    on = {gpu: estimate(names["gpt2"], gpu=gpu, batch=2).phases["forward"]["activations"] for gpu in ("cpu", "a100-80")}
    tokens, hidden, layers, heads = 2 * 32, 32, 2, 4
    masks = (2 * layers + 1) * tokens * hidden * (4 - 1)
    assert on["cpu"] - on["a100-80"] > masks + layers * heads * 2 * 32 * 32 * 4


@pytest.mark.parametrize(("name", "places"), [
    ("gpt2", ("embd_pdrop", "resid_pdrop")), ("masked", ("hidden_dropout_prob",))])
def test_a_model_with_dropout_is_the_one_without_and_its_masks(names, tmp_path, name, places):
    """On a GPU, where attention draws its own again in backward. Both have 2 x 2 + 1 places of (2, 32, 32) bytes."""
    read = {}
    for rate in (0.0, 0.1):
        config = json.loads(Path(names[name]).read_text()) | dict.fromkeys(places, rate)
        (tmp_path / "config.json").write_text(json.dumps(config))
        read[rate] = estimate(str(tmp_path), gpu="a100-80", batch=2, sequence=32).phases["forward"]["activations"]
    assert read[0.1] - read[0.0] == 5 * 2 * 32 * 32


def test_what_no_gpu_holds_is_reserved_in_full():
    """A replay on a device of 80 GiB ends at the request that fails, and said 80 GiB of all that is larger."""
    found = estimate("llama2-7b", sequence=8, gpu="h100-sxm")
    assert found.reserved >= found.peak.total > 16 * 6.7e9 > found.gpu.reported_bytes and not found.fits


@pytest.mark.parametrize(("name", "message"), [
    ("no_loss", r"the model returned a tensor of shape \(2, 8\): expected its loss"),
    ("no_batch", "returned a Linear alone, and what it is called with is not known: return"),
    ("no_model", r"build\.py:no_model returned a int: expected a torch.nn.Module, or \(model, batch\)"),
    ("looks_at_values", r"build\.py:\d+: `torch.rand\(5\).nonzero\(\)`"),
    ("fails", r"build\.py:\d+: `UNHEARD_OF` raises NameError in a dry run: name 'UNHEARD_OF' is not defined"),
    ("refuses", r"build\.py:\d+: `raise ValueError\(.three heads.\)` raises ValueError in a dry run: three heads"),
    ("frozen", r"build\.py:frozen: none of its 321 parameters needs a gradient: nothing would be trained"),
    ("of_a_width", r"build\.py:of_a_width needs width: expected a function of batch and sequence, or of nothing"),
    ("absent", r"build\.py has no function 'absent'; it has gpt, gemma, regression, frozen")])
def test_a_model_that_cannot_be_built_or_run_is_refused_with_its_line(names, name, message):
    with pytest.raises(ValueError, match=message):
        estimate(names[name])
