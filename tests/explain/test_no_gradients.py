"""Parameters without gradients, as those inside of a frozen model that is recomputed."""

from explain_kit import explained

FROZEN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
base = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)).requires_grad_(False)
trained = [block[0].weight.requires_grad_() for block in base]
scale = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([*trained, scale], lr=0.1)
for step in range(5):
    x = torch.randn(4, 32)
    for block in base:
        x = checkpoint(block, x, use_reentrant=True)
    loss = x.square().mean() + scale.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CURED = ("x = torch.randn(4, 32)", "x = torch.randn(4, 32, requires_grad=True)")
CURE = "call `model.enable_input_require_grads()`"


def test_parts_that_train_below_recomputation_without_input_gradients(tmp_path):
    found = explained(tmp_path / "script.py", FROZEN)
    [note] = [note for note in found.notes if "no gradient" in note]
    assert note.startswith(f"{2 * 32 * 32:,} numbers that an optimizer is to update") and CURE in note
    cured = explained(tmp_path / "cured.py", FROZEN, [CURED])
    assert not [note for note in cured.notes if "no gradient" in note]


def test_without_recomputation_another_reason_is_not_known(tmp_path):
    changes = [("checkpoint(block, x, use_reentrant=True)", "block(x)"), (" + scale.sum()", ""),
               ("[*trained, scale]", "[*base.parameters(), scale]")]  # frozen ones among them
    [note] = [note for note in explained(tmp_path / "script.py", FROZEN, changes).notes if "no gradient" in note]
    assert note == "3 numbers that an optimizer is to update had no gradient at its first step"


def test_where_nothing_wants_a_gradient_the_error_is_explained(tmp_path):
    changes = [(" + scale.sum()", "")]
    found = explained(tmp_path / "script.py", FROZEN, changes)
    assert found.run.status == 1 and any(CURE in note for note in found.notes)
    assert explained(tmp_path / "cured.py", FROZEN, [*changes, CURED]).run.done
