"""What the arithmetic leaves out is what a program holds beside it, to the byte and by name."""

from explain_kit import recorded

from refimpl.explain.arithmetic import arithmetic

CLASSES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(9):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(512, 64)), torch.randint(10, (512,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_small_loop_is_twelve_bytes_for_each_parameter_and_what_is_named(tmp_path):
    found = arithmetic(recorded(tmp_path / "train.py", CLASSES))
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert found.expected == 12 * parameters and found.terms == f"12 bytes × {parameters:,} parameters"
    rest = dict(found.rest)
    assert found.expected + sum(rest.values()) == found.peak
    assert rest["the batch"] == 4 * 512 * 64
    assert rest["other activations"] == 4 * 512 * 128
    assert not {name for name in rest if name.startswith("parameters") or name == "resized storages"}
