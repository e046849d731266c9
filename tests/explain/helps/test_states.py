"""Which bytes of a recorded peak a technique takes away."""

from explain_kit import helps_of, recorded

from refimpl.explain.helps.effects import EFFECTS

CLASSES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(9):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

BALANCED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 96, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(9):
    logits = model(torch.randn(512, 64))
    share = logits.softmax(1).mean(0)
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(96, (512,)))
    (loss + (share * share.log()).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_autocast_leaves_half_of_what_is_computed(tmp_path):
    timeline = recorded(tmp_path / "train.py", CLASSES)
    row, held = timeline.peak_row, timeline.trace.peak
    spans = EFFECTS["autocast"](timeline).spans
    taken = -sum(nbytes for first, after, nbytes in spans if first <= row < after)
    computed = sum(held[name] for name in ("activations", "temporaries", "inputs"))
    assert taken == computed // 2 + held["gradients"] and computed > 3 * 4 * 512 * 64


def test_a_bound_of_autocast_counts_the_workspaces_of_32_bit_products(tmp_path):
    """Here the peak would be next to one of 1 MiB, which a product of 16 bits does not take."""
    before, after = (recorded(tmp_path / "train.py", BALANCED, switch=switch) for switch in (None, "autocast"))
    promise = helps_of(before)["autocast"]
    assert promise.bound and 0 < before.last_peak - after.last_peak <= promise.saves
