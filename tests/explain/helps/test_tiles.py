"""What attention in tiles would change in a recording."""

from collections import Counter

from explain_kit import PROGRAMS, helps_of, recorded

from refimpl.explain.helps.effects import EFFECTS

SHARED_KEYS = """
import torch
from torch import nn
torch.manual_seed(0)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
    def forward(self, x):
        q = self.q(x).view(2, 48, 4, 16).transpose(1, 2)
        k, v = (y.view(2, 48, 2, 1, 16).permute(0, 2, 3, 1, 4).expand(2, 2, 2, 48, 16).reshape(2, 4, 48, 16)
                for y in (self.k(x), self.v(x)))
        return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)

model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.randn(2, 48, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_every_step_is_changed_alike(tmp_path):
    """Of scores, products, and keys and values that are repeated for the heads that share them: half of these go."""
    timeline = recorded(tmp_path / "train.py", SHARED_KEYS)
    spans = EFFECTS["attention"](timeline).spans
    first, second = (Counter(nbytes for begin, _, nbytes in spans if step[0] <= begin < step[1])
                     for step in timeline.steps)
    assert first == second and first.total() + second.total() == len(spans)
    assert first[-2 * 4 * 48 * 16 * 4 // 2] >= 2 and first[-2 * 4 * 48 * 48 * 4] >= 2


def test_masks_as_lists_of_blocks(tmp_path):
    """What is promised of the program's mask is a bound, and nearly what `sparse` saves."""
    text = (PROGRAMS / "dense_mask.py").read_text()
    begin, end = text.index("    same = "), text.index("    model(")
    other = text[:begin] + text[end:].replace("position_ids=position, attention_mask=mask, ", "")
    other = other.replace("optimizer = ", "ids = torch.arange(2048)[None] // 256\n"
                          "sparse(model, lambda T: documents_mask(ids), kernel='tiled')\noptimizer = ")
    dense = recorded(tmp_path / "dense.py", text)
    lists = recorded(tmp_path / "lists.py", "from refimpl.attention import documents_mask, sparse\n" + other)
    promise = helps_of(dense)["sparse"]
    saved = dense.last_peak - lists.last_peak
    assert promise.bound and saved - 2048 <= promise.saves <= 1.3 * saved
    assert helps_of(lists)["sparse"].why == "no mask of tokens × tokens is in memory"
