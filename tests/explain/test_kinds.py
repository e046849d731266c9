"""What a storage is called by its shape."""

from explain_kit import recorded

from refimpl.explain.kinds import LOG_PROBABILITIES, LOGITS, OTHER_ACTIVATIONS, Kinds

BALANCED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(16, 48, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    logits = model(torch.randn(32, 16))
    share = logits.softmax(1).mean(0)
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(48, (32,)))
    (loss + (share * share.log()).sum()).backward()
    optimizer.step()
"""


def test_rows_of_logits_are_told_from_a_vector_of_their_length(tmp_path):
    timeline = recorded(tmp_path / "train.py", BALANCED)
    kinds, found = Kinds(timeline), {}
    for i in timeline.where("activations"):
        found.setdefault(tuple(timeline.records[i].shape), set()).add(kinds[i])
    assert found[48,] == {OTHER_ACTIVATIONS}
    assert found[32, 48] == {LOGITS, LOG_PROBABILITIES}
