"""transformers' Trainer with a GuardCallback: its steps are counted, and no try that failed is lost."""

import subprocess
import sys

import pytest
import torch
from outside.models import GROUPED, causal, text
from transformers import Trainer, TrainingArguments

from refimpl.guard.guard import _open
from refimpl.guard.step_log import lines
from refimpl.guard.trainer_callback import GuardCallback


@pytest.fixture
def trainer(tmp_path):
    """Makes a Trainer of 8 rows, whose model fails with more than `most` of them."""
    def made(steps, most=8, **options):
        torch.manual_seed(0)
        model = causal("llama", **GROUPED)()
        rows = [{key: value[i] for key, value in text(8, 16)().items()} for i in range(8)]

        def forward(module, args):
            if len(args[0]) > most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3 bytes")
        model.lm_head.register_forward_pre_hook(forward)
        arguments = TrainingArguments(tmp_path / "out", per_device_train_batch_size=8, max_steps=steps, report_to=[],
                                      use_cpu=True, disable_tqdm=True, logging_strategy="no", save_steps=2, **options)
        return Trainer(model, arguments, train_dataset=rows, callbacks=[GuardCallback(tmp_path / "oom")])
    yield made
    while _open:
        _open[0].__exit__(None, None, None)


def steps(folder):
    return [(each["step"], each["batch"]["shape"]) for each in lines(folder / "rank0.steps.jsonl") if "peak" in each]


def ended(folder):
    return lines(folder / "rank0.steps.jsonl")[-1]["ended"].removeprefix("by ")


def test_steps_are_counted_as_trainer_counts_them_and_on_where_a_run_is_resumed(trainer, tmp_path):
    trainer(2, gradient_accumulation_steps=2).train()
    assert steps(tmp_path / "oom") == [(1, [8, 16]), (2, [8, 16])] and ended(tmp_path / "oom") == "itself"
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and steps(tmp_path / "oom") == [(3, [8, 16]), (4, [8, 16])]
    assert len(steps(tmp_path / "oom" / "earlier" / "1")) == 2 and not _open


def test_each_try_of_a_smaller_batch_is_reported_and_the_run_goes_on(trainer, tmp_path):
    trainer(3, most=6, auto_find_batch_size=True).train()
    log = lines(tmp_path / "oom" / "rank0.steps.jsonl")
    assert [(each["failed"], each["step"]) for each in log if "failed" in each] == [(1, 1), (2, 1)]
    assert steps(tmp_path / "oom") == [(1, [6, 16]), (2, [2, 16]), (3, [6, 16])], "a step's batch is one that passed"
    assert ended(tmp_path / "oom") == "itself"


def test_a_training_that_raised_is_closed_by_the_next(trainer, tmp_path):
    failing = trainer(2, most=6)
    with pytest.raises(RuntimeError, match="you tried to allocate 3 bytes") as error:
        failing.train()
    assert "rank0.failure1.txt" in error.value.__notes__[0] and len(_open) == 1
    failing.train_dataset = failing.train_dataset[:6]
    failing.train()
    assert ended(tmp_path / "oom" / "earlier" / "1") == "UnknownError"
    assert (tmp_path / "oom" / "earlier" / "1" / "rank0.failure1.txt").exists()
    assert steps(tmp_path / "oom") == [(1, [6, 16]), (2, [6, 16])] and not _open


def test_what_a_process_ends_with_is_in_the_log_and_nothing_is_loaded_before(tmp_path):
    """The guard is left open by an error outside of a model, of which nobody tells it."""
    code = """if True:
        import sys, torch, refimpl.guard, refimpl.cli
        assert not {"transformers", "lightning", "pytorch_lightning"} & set(sys.modules)
        from refimpl.guard.around_training import AroundTraining
        around = AroundTraining("oom", None)
        around.begin()
        torch.empty(2**60, dtype=torch.uint8)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "you tried to allocate" in done.stderr
    assert ended(tmp_path / "oom") == "RuntimeError" and (tmp_path / "oom" / "rank0.failure1.txt").exists()
