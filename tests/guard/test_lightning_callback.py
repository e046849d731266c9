"""Lightning's Trainer with a GuardCallback: it calls training_step, and not the model."""

import sys

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch

from refimpl.guard.guard import _open
from refimpl.guard.lightning_callback import GuardCallback, _callback
from refimpl.guard.step_log import lines


class Module(lightning.LightningModule):
    def __init__(self, fails_in=None):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
        self.fails_in = fails_in

    def training_step(self, batch, i):
        if self.trainer.global_step + 1 == self.fails_in:
            batch = batch[:1].expand(2**50, 16)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def fit(tmp_path):
    def fitted(module, steps, **options):
        trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", logger=False, default_root_dir=tmp_path,
                                    enable_progress_bar=False, callbacks=[GuardCallback(tmp_path / "oom")])
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=8), **options)
        return trainer
    yield fitted
    assert not _open


def log(folder):
    return lines(folder / "rank0.steps.jsonl")


def test_the_batch_and_the_phases_are_found_and_a_resumed_run_counts_on(fit, tmp_path):
    fit(Module(), 4).save_checkpoint(tmp_path / "a.ckpt")
    found = [each for each in log(tmp_path / "oom") if "peak" in each]
    assert [(each["step"], each["batch"] and each["batch"]["shape"]) for each in found] == [
        (1, None), (2, [8, 16]), (3, [8, 16]), (4, [8, 16])]
    assert all({"forward", "backward", "optimizer"} <= each["phases"].keys() for each in found[1:])
    assert [*found[0]["phases"]] == ["start", "backward", "optimizer"], "the step's closure is not the update"
    fit(Module(), 6, ckpt_path=tmp_path / "a.ckpt")
    assert [each["step"] for each in log(tmp_path / "oom") if "peak" in each] == [5, 6]
    assert log(tmp_path / "oom")[-1]["ended"] == "by itself"


def test_an_exception_is_reported_and_goes_on(fit, tmp_path):
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        fit(Module(fails_in=3), 4)
    assert "rank0.failure1.txt" in error.value.__notes__[0]
    assert [each.get("failed", each.get("ended")) for each in log(tmp_path / "oom")[-2:]] == [1, "by RuntimeError"]


def test_the_lightning_that_the_program_has_loaded_is_taken(monkeypatch):
    assert issubclass(GuardCallback, lightning.Callback)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert _callback() is pytorch_lightning.Callback is not lightning.Callback
    monkeypatch.setattr("refimpl.guard.lightning_callback.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        _callback()
