"""Lightning's Trainer with a GuardCallback: it calls training_step, and not the model."""

import sys

import pytest
import torch

from refimpl.guard.guard import _open
from refimpl.guard.step_log import lines

lightning = pytest.importorskip("lightning.pytorch")


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
    from refimpl.guard.lightning_callback import GuardCallback

    def fitted(module, steps, **options):
        trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
                                    enable_model_summary=False, default_root_dir=tmp_path,
                                    callbacks=[GuardCallback(tmp_path / "oom")])
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=8), **options)
        return trainer
    yield fitted
    assert not _open


def log(folder):
    return lines(folder / "rank0.steps.jsonl")


def test_the_batch_and_the_phases_are_found_and_a_resumed_run_counts_on(fit, tmp_path):
    fit(Module(), 4).save_checkpoint(tmp_path / "a.ckpt")
    found = [each for each in log(tmp_path / "oom") if "peak" in each]
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert [each["batch"] and each["batch"]["shape"] for each in found] == [None, *[[8, 16]] * 3]
    for each in found[1:]:
        assert {"forward", "backward", "optimizer"} <= each["phases"].keys()
    assert [*found[0]["phases"]] == ["start", "backward", "optimizer"], "the step's closure is not the update"
    fit(Module(), 6, ckpt_path=tmp_path / "a.ckpt")
    assert [each["step"] for each in log(tmp_path / "oom") if "peak" in each] == [5, 6]
    assert log(tmp_path / "oom")[-1]["ended"] == "by itself"


def test_an_exception_is_reported_and_goes_on(fit, tmp_path):
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        fit(Module(fails_in=3), 4)
    assert "rank0.failure1.txt" in error.value.__notes__[0]
    *_, failed, ended = log(tmp_path / "oom")
    assert (failed["failed"], failed["step"], ended["ended"]) == (1, 3, "by RuntimeError")


def test_the_lightning_that_the_program_has_loaded_is_taken(monkeypatch):
    from refimpl.guard.lightning_callback import GuardCallback, _callback

    assert issubclass(GuardCallback, lightning.Callback)
    other = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert _callback() is other.Callback is not lightning.Callback
    monkeypatch.setattr("refimpl.guard.lightning_callback.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        _callback()
