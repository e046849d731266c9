"""What README says of Trainer: its loop stays, the peak falls, it learns the same; a context that ends does nothing."""

import contextlib

import pytest
import torch
from outside.models import GROUPED, causal, text

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.cross_entropy import without_logits
from refimpl.mixed_precision import MixedPrecisionOptimizer
from refimpl.mlp import memory_efficient_mlps

WIDE = {**GROUPED, "vocab_size": 2048, "num_hidden_layers": 4}


def trained(folder, before=None, around=None, optimizer=None):
    """(peak above the start, parameters) of two steps of Trainer."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = causal("llama", **WIDE)()
    torch.manual_seed(0)
    batch = text(8, 128, 2048)()
    if before:
        before(model)
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no",
                                  use_cpu=True, disable_tqdm=True, seed=0, logging_strategy="no")
    rows = [{key: value[i] for key, value in batch.items()} for i in range(8)]
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer and optimizer(model), None))
    with memory.track(model) as t, around(model) if around else contextlib.nullcontext():
        trainer.train()
    return t.peak.total - t.start.total, torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("how", "share", "apart"), [
    ({"before": lambda model: without_logits(model)}, 0.65, 1e-5),
    ({"before": memory_efficient_mlps}, 0.95, 1e-5),
    ({"around": lambda model: recompute(model.model.layers)}, 0.7, 0),
    ({"optimizer": lambda model: MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=5e-5))}, 0.95, 1e-3)])
def test_techniques_in_their_trainer(plain, tmp_path, how, share, apart):
    peak, parameters = trained(tmp_path, **how)
    assert peak <= share * plain[0], f"{peak / plain[0]:.2f} of the plain peak"
    assert (parameters - plain[1]).abs().max() <= apart


def test_a_context_that_ends_too_early_saves_nothing(plain, tmp_path):
    def ended(model):
        with recompute(model.model.layers):
            pass

    assert trained(tmp_path, before=ended)[0] > 0.99 * plain[0]
