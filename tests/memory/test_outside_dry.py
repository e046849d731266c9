"""Programs on models that nobody here wrote, run dry and tracked: built inside, by category, to the byte."""

import gc
import importlib

import pytest
import torch

from refimpl import memory

PROGRAMS = pytest.importorskip("outside_programs").PROGRAMS
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

# One of each family, and every way of computing it: attentions, recomputation, autocast, adapters, all loops.
SAME = """
gpt2, clipped; gpt2, two micro-batches; gpt2, autocast; llama, eager attention; llama, padded; llama, bf16; qwen3; opt;
bloom, an autograd.Function; gpt2, recomputed; gpt2, recomputed, reentrant; llama, recomputed;
llama, recomputed, reentrant; bert, recomputed, autocast; bert, LBFGS; roberta, autocast; modernbert; longformer;
fnet, complex numbers; reformer, reversible; t5; bart; marian; mixtral, grouped experts; mixtral, batched experts;
gpt-oss; mamba; rwkv; vit; swin; convnext; dinov2; timm: vit; timm: swin; timm: mobilenetv3; LoRA on gpt2;
LoRA on llama, recomputed; IA3 on llama; prompt tuning of gpt2; Trainer, gpt2; Trainer, bert, bf16, accumulating;
Trainer, llama, recomputing; Trainer, its own optimizer; Accelerate, llama; Accelerate, vit;
llama, stepping in backward; gpt2, under save_on_cpu; vit, gradient penalty; convnext, moving average
"""
NAMES = [name.strip() for name in SAME.replace("\n", " ").split(";")]
MIXTRAL, SWITCH = "mixtral, a loop over experts", "switch transformer"
WAV2VEC2, EXPERTS = "wav2vec2", "MixtralExperts.forward"


def run(name):
    PROGRAMS[name]().step()


def compare(name, **declared):
    """Return (tracked, dry), after asserting that they are the same."""
    for library in ("peft", "timm"):  # they make tensors when they are imported, as a program may do at any line
        importlib.import_module(library)

    with memory.track() as real:
        run(name)
    dry = memory.dry_run(run, name, **declared)
    assert dry.peak == real.peak and dry.now == real.now
    return real, dry


@pytest.fixture
def without_collection():
    """Cycles of Python objects hold tensors until the collector comes by: it does not, in either run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", NAMES)
def test_the_dry_run_reads_what_the_real_run_reads(name, without_collection):
    compare(name)


def routing(monkeypatch, name):
    """How many tokens each call of an expert got in a run of the program, which draws the same numbers each time."""
    found, real = [], torch.where
    def where(*args):
        result = real(*args)
        if len(args) == 1:
            found.append(len(result[0]))
        return result
    with monkeypatch.context() as patch:
        patch.setattr(torch, "where", where)
        run(name)
    return found


def test_experts_with_declared_loads(monkeypatch, without_collection):
    loads = iter(routing(monkeypatch, MIXTRAL))
    found = [size for four in zip(*[loads] * 4, strict=True) for size in (4, *four)]  # experts hit, tokens of each
    _, dry = compare(MIXTRAL, sizes={f"modeling_mixtral.py:{EXPERTS}": found})
    assert any("`expert_mask[expert_idx]` reads 0" in note for note in dry.notes)


def test_balanced_experts(without_collection):
    """Balanced: each expert gets tokens × top_k / experts. The real run is near it, and so are the bytes."""
    with memory.track() as real:
        run(MIXTRAL)
    dry = memory.dry_run(run, MIXTRAL, sizes={f"modeling_mixtral.py:{EXPERTS}": [4, *[1 / 4] * 4]})
    assert dry.peak.total == pytest.approx(real.peak.total, rel=0.01)
    spoilt = memory.dry_run(run, MIXTRAL, sizes={"modeling_mixtral.py:forward": [4, *[1.0] * 4]})
    assert spoilt.peak.total > 1.5 * real.peak.total  # every expert gets every token


@pytest.mark.parametrize(("name", "place", "asked"), [
    (MIXTRAL, "transformers/models/mixtral/modeling_mixtral.py:", "nonzero"),
    (SWITCH, "transformers/models/switch_transformers/modeling_switch_transformers.py:", "nonzero"),
    (WAV2VEC2, "transformers/loss/loss_ctc.py:", "masked_select")])
def test_routing_is_never_guessed(name, place, asked):
    with pytest.raises(ValueError, match=asked) as caught:
        memory.dry_run(run, name)
    assert str(caught.value).startswith(place) and f"sizes={{'{place}" in str(caught.value)
    assert caught.value.trace.peak.total > 0


def test_a_declared_mask(without_collection):
    """No label is padding: all of them are found, and the longest target has them all."""
    compare(WAV2VEC2, sizes={"loss_ctc.py:ForCTCLoss": [1.0, 8]})
