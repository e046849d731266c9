"""Rows are followed from the batch: what is cut with them is bounded nearly, what ties them to each other is named."""

import textwrap

import pytest
import torch
from explain_kit import PROGRAMS, helps_of

from refimpl.accumulation import accumulate
from refimpl.activations import compress_activations, offload_activations
from refimpl.checkpointing import recompute
from refimpl.cross_entropy import without_logits
from refimpl.explain import Script, run
from refimpl.explain.helps import TECHNIQUES
from refimpl.explain.recorded_timeline import RecordedTimeline
from refimpl.mlp import memory_efficient_mlps
from refimpl.model import GPT, GPTConfig

LOOP = """
import sys, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
parts = int(sys.argv[1])
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    x = {batch}
    for part in x.chunk(parts):
        (model(part).square().mean() / parts).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODELS = {
    "with a cache": ("class Net(nn.Module):\n"
                     "    def __init__(self):\n"
                     "        super().__init__()\n"
                     "        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)\n"
                     "    def forward(self, x):\n"
                     "        kept = torch.cat([torch.tensor([]), self.a(x)[:, None]], dim=-2)\n"
                     "        return self.b(kept[:, 0].relu())\n"
                     "model = Net()", "torch.randn(256, 64)"),
    "linear": ("model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))",
               "torch.randn(512, 64)"),
    "of weights' size": ("model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), "
                         "nn.Linear(64, 4096))", "torch.randn(64, 64)"),
    "images": ("model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3), "
               "nn.Flatten(), nn.Linear(12544, 8))", "torch.rand(16, 3, 32, 32)"),
    "tokens": ("layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)\n"
               "encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)\n"
               "model = nn.Sequential(nn.Embedding(300, 64), encoder)",
               "torch.randint(300, (16, 32))"),
    "transposed": ("class Net(nn.Module):\n"
                   "    def __init__(self):\n"
                   "        super().__init__()\n"
                   "        self.a, self.b = nn.Linear(32, 96), nn.LSTM(96, 96)\n"
                   "    def forward(self, x):\n"
                   "        return self.b(self.a(x).transpose(0, 1).contiguous())[0].flatten(0, 1)\n"
                   "model = Net()", "torch.randn(32, 24, 32)")}


@pytest.fixture
def ran(tmp_path):
    def ran(text, *arguments):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        made = run(Script(path, arguments), 2)
        assert made.done, made.ending.text
        return RecordedTimeline(made.recording)
    return ran


@pytest.mark.parametrize("name", MODELS)
def test_two_micro_batches_save_at_most_what_is_said_and_nearly_that(ran, name):
    model, batch = MODELS[name]
    whole, halves = (ran(LOOP.format(model=model, batch=batch), parts) for parts in "12")
    promise, saved = helps_of(whole)["accumulate"], whole.last_peak - halves.last_peak
    assert promise.bound and 0 < saved <= promise.saves <= 1.3 * saved, (saved, promise.saves)


@pytest.mark.parametrize(("name", "why"), [
    ("contrastive", "each row is compared with the others"), ("autocast", "batch norm takes its mean over the rows"),
    ("convolutions", "batch norm takes its mean over the rows"),
    ("graph", "a model is called on tensors with 300, 2, 1500 in their first dimensions"),
    ("policy", None), ("input_gradients", None)])
def test_what_ties_rows_to_each_other_is_named(name, why):
    made = run(Script(PROGRAMS / f"{name}.py"), 2)
    found = helps_of(RecordedTimeline(made.recording))["rows"]
    assert (why in found.why and found.saves == 0) if why else found.saves > 0, found


def test_a_mean_over_rows_that_goes_back_into_them_is_named(ran):
    found = helps_of(ran("""
        import torch
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = model(torch.randn(256, 64))
            (x - x.mean(0)).square().mean().backward()
            optimizer.step()
        """))["accumulate"]
    assert found.saves == 0 and found.why == "a mean or sum over the rows goes back into them"


def test_what_an_evaluation_keeps_is_not_cut():
    made = run(Script(PROGRAMS / "evaluated.py"), 2)
    timeline = RecordedTimeline(made.recording)
    found = helps_of(timeline)
    assert all(found[name].saves < 0.02 * timeline.peak for name in ("rows", "accumulate"))


CALLS = {"accumulate": {"accumulate": accumulate}, "rows": {"accumulate": accumulate},
         "recompute": {"checkpointing": type("", (), {"recompute": staticmethod(recompute)})},
         **dict.fromkeys(("masks", "bf16", "int8"), {"compress_activations": compress_activations}),
         "host": {"offload_activations": offload_activations},
         "logits": {"without_logits": without_logits}, "mlp": {"memory_efficient_mlps": memory_efficient_mlps}}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_printed_can_be_made(name):
    model, batch = GPT(GPTConfig(vocab_size=64, context_length=16, layers=2, hidden=32, heads=2)), [
        torch.randint(64, (4, 16)) for _ in range(2)]
    call = next(technique.call for technique in TECHNIQUES if technique.name == name)
    eval(call, CALLS[name] | {"model": model, "batch": batch, "blocks": list(model.blocks)})
