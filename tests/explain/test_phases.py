"""The phases of a script, each with its peak: told from what models, savings and backwards do."""

import textwrap

import pytest

from refimpl.explain import Explanation, Script, run
from refimpl.explain.phases import EVALUATION, GENERATION, RESUME, SAVE

TRAINING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
weights = 4 * (2 * 64 * 256 + 256 + 64)


def step():
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS = 4 * (2 * 64 * 256 + 256 + 64)
KEPT = 3 * WEIGHTS  # between two steps: weights and Adam's moments


@pytest.fixture
def explained(tmp_path, monkeypatch):
    def explained(text, **options):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text(TRAINING + textwrap.dedent(text))
        return Explanation(run(Script("train.py"), **options))
    return explained


def test_a_step_has_its_three_phases_and_no_other(explained):
    phases = explained("for _ in range(9): step()").phases
    assert list(phases) == ["start", "forward", "backward", "optimizer", "between"]
    assert phases["start"] < WEIGHTS + 4096 < KEPT < phases["forward"] < phases["backward"] < phases["optimizer"]


@pytest.mark.parametrize("head", ["torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()"])
def test_a_forward_without_its_backward_is_evaluation_and_what_it_collects(explained, head):
    found = explained(f"""
        for _ in range(9):
            step()
            with {head}:
                seen = torch.cat([model(torch.randn(500, 64)) for _ in range(8)])
            del seen
        """)
    collected = 2 * 4000 * 64 * 4  # the parts and the whole
    assert found.phases[EVALUATION] >= KEPT + collected and max(found.phases.values()) == found.phases[EVALUATION]
    assert found.phase_of_peak == EVALUATION and ", evaluation\n" in str(found)
    assert found.as_dict()["peaks of phases"] == found.phases


def test_a_model_that_does_not_train_is_part_of_the_forward_that_it_serves(explained):
    found = explained("""
        teacher = nn.Linear(64, 64).requires_grad_(False)
        for _ in range(9):
            (model(torch.ones(8, 64)) - teacher(torch.ones(8, 64))).square().mean().backward()
            optimizer.step()
        """)
    assert EVALUATION not in found.phases


def test_generation_is_told_by_its_method(explained):
    found = explained("""
        def generate(x):
            with torch.no_grad():
                for _ in range(3):
                    x = model(x)
            return x
        for _ in range(9):
            step()
            generate(torch.randn(8, 64))
        """)
    assert GENERATION in found.phases and EVALUATION not in found.phases


def test_a_copy_for_a_checkpoint_is_the_save_s(explained):
    found = explained("""
        for _ in range(9):
            step()
            state = {name: each.clone() for name, each in model.state_dict().items()}
            torch.save(state, "model.pt")
            del state, each
        """)
    assert KEPT + WEIGHTS <= found.phases[SAVE] < KEPT + WEIGHTS + 4096


def test_what_is_loaded_is_resume(explained):
    found = explained("""
        torch.save(model.state_dict(), "model.pt")
        model.load_state_dict(torch.load("model.pt"))
        for _ in range(9):
            step()
        """)
    assert 2 * WEIGHTS <= found.phases[RESUME] < 2 * WEIGHTS + 4096


def test_a_gan_s_generator_is_no_evaluation_though_its_backward_comes_after_another_step(explained):
    found = explained("""
        other = torch.optim.SGD(model[:1].parameters())
        critic = nn.Linear(64, 1)
        judge = torch.optim.SGD(critic.parameters(), 0.1)
        for _ in range(9):
            fake = model(torch.randn(8, 64))
            critic(fake.detach()).mean().backward()
            judge.step()
            critic(fake).mean().backward()
            optimizer.step()
        """, until="evaluation")
    assert EVALUATION not in found.phases and not found.run.done, "it ran to its end, and looked for one in vain"


@pytest.mark.parametrize(("phase", "does"), [(EVALUATION, "torch.no_grad()(model)(torch.ones(8, 64))"),
                                             (SAVE, "torch.save(model.state_dict(), 'model.pt')")])
def test_it_goes_on_until_a_phase_has_been(explained, phase, does):
    text = f"""
        for i in range(40):
            step()
            if i == 6:
                {does}
        """
    def is_missed(found):
        return any(f"no {phase}" in note for note in found.notes)

    assert phase not in explained(text).phases and is_missed(explained(text))
    found = explained(text, until=phase)
    assert phase in found.phases and found.run.done and not is_missed(found)
    assert found.run.words in ("8 steps of AdamW, then ended", "9 steps of AdamW, then ended")


def test_torch_is_as_it_was_afterwards(explained):
    import torch

    before = torch.save, torch.nn.Module.state_dict, torch.optim.Optimizer.load_state_dict
    explained("for _ in range(9): step()")
    assert (torch.save, torch.nn.Module.state_dict, torch.optim.Optimizer.load_state_dict) == before


def test_what_a_model_does_itself_is_its_forward(explained):
    found = explained("""
        model = nn.Linear(64, 4096, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9):
            model(torch.randn(64, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    assert found.phases["forward"] >= 4 * (64 * 4096 + 64 * 4096 + 64 * 64) > found.phases["start"]
