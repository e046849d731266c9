"""A newer torch, a torchvision of another build, a build for a GPU that is not there: what is said, and what works."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from refimpl import allocator, cli, estimate, explain, versions
from refimpl.checkpointing import AdaptiveCheckpoint, checkpoint

ROOT = Path(__file__).parent.parent
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
TRAINING = f"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{CONFIG}))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 256, (2, 64))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def refimpl(folder, *arguments):
    """Run the command as a user does: in another folder, without anything that these tests prepare."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run([sys.executable, "-m", "refimpl", *arguments], cwd=folder, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(ROOT)}, timeout=300)


def test_estimate_builds_a_config_json_by_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = refimpl(tmp_path, "estimate", "config.json")
    assert done.returncode == 0, done.stderr
    assert "transformers " in done.stdout and "our GPT stands in" not in done.stdout


def test_explain_runs_a_script_of_transformers(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    done = refimpl(tmp_path, "explain", "train.py")
    assert done.returncode == 0, done.stderr
    assert "peak on cpu" in done.stdout and "LlamaForCausalLM" in done.stdout and "torchvision" not in done.stdout


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A torchvision as it is beside a build of torch that it was not made for, and a name for its version."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    about = tmp_path / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


CURE = "torchvision 0.28.0 was built for another torch than .*: run `pip uninstall torchvision`"


def test_a_torchvision_that_does_not_fit_has_a_cure_in_explain(broken):
    (broken / "train.py").write_text("import torchvision\n")
    made = explain.run(explain.Script(broken / "train.py"), 1)
    (note,) = explain.Explanation(made).notes
    assert re.match(CURE, note)


def test_a_torchvision_that_does_not_fit_has_a_cure_in_estimate(broken, monkeypatch):
    (broken / "config.json").write_text(json.dumps(CONFIG))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    (broken / "transformers").mkdir()  # as transformers does, which imports torchvision for its model classes
    (broken / "transformers" / "__init__.py").write_text(
        "try:\n    import torchvision\nexcept RuntimeError as error:\n"
        "    raise ModuleNotFoundError('Could not import module LlamaConfig') from error\n")
    with pytest.raises(ValueError, match=CURE):
        estimate.estimate(str(broken / "config.json"), builder="transformers")


def test_other_errors_have_no_cure():
    assert versions.misfit("RuntimeError: operator aten::nms does not exist") is None
    assert versions.misfit(ValueError("torchvision")) is None


@pytest.mark.parametrize(("version", "said"), [
    (torch.__version__, None), ("2.11.0+cpu", None), ("2.14.1+cu130", None), ("2.9.1", None),
    ("2.15.0.dev1", "refimpl is tested up to torch 2.14; here is torch 2.15.0.dev1"),
    ("3.0.0", "refimpl is tested up to torch 2.14; here is torch 3.0.0")])
def test_a_newer_torch_than_any_tested_is_said(version, said):
    assert versions.untested(version) == said


def test_a_newer_torch_is_one_line_of_a_command_and_no_refusal(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    cli.main(["estimate", "gpt2", "--sequence", "8"])
    said = capsys.readouterr()
    assert said.err == "refimpl is tested up to torch 2.14; here is torch 2.99.0\n" and "total" in said.out


# --- a build for CUDA on a machine without a GPU ---------------------------------------------------------------------


@pytest.fixture
def built_for_cuda(monkeypatch):
    """A CUDA build of torch where there is no GPU: it names an accelerator, unless asked for one that is there."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available=False: None if check_available else torch.device("cuda"))


def test_without_a_gpu_a_pool_is_on_the_cpu(built_for_cuda):
    with allocator.GPUMemoryPool(2**16) as pool:
        x = pool.allocate((4,))
        assert x.device.type == "cpu"
        pool.free(x)


def test_without_a_gpu_a_budget_makes_blocks_recompute(built_for_cuda):
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for budget, recomputed in ((1, True), (2**60, False)):
        adaptive = AdaptiveCheckpoint(budget=budget).apply(blocks)
        x = torch.randn(2, 8, requires_grad=True)
        nn.Sequential(*blocks)(x).sum().backward()
        assert adaptive.recomputed == [recomputed] * 3
        adaptive.remove()


def test_without_a_gpu_what_runs_again_draws_the_same_numbers(built_for_cuda):
    x = torch.ones(100, requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x) * x, x)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach())
