"""Programs as people write them, unmodified: the total is what the allocator alone says, and each ends by itself."""

import pytest
from allocator_peaks import peak_of
from explain_kit import PROGRAMS, explained

from refimpl.explain import Explanation, Script, run
from refimpl.explain.recorded_timeline import RecordedTimeline

ALL = sorted(path.stem for path in PROGRAMS.glob("*.py"))
PUSHED = ("closures", "given_up", "graph", "input_gradients", "log_probabilities", "policy", "recurrent",
          "replay_buffer", "resumed", "small_gpt", "sums", "two_networks")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.core if name in PUSHED else pytest.mark.nightly)
                                  for name in ALL])
def test_the_total_is_the_allocator_s(name):
    made = run(Script(PROGRAMS / f"{name}.py"), 2)
    assert made.done, made.words
    peak, alone = RecordedTimeline(made.recording).peak, peak_of(PROGRAMS / f"{name}.py", len(made.recording.steps))
    assert abs(peak - alone) <= 0.005 * alone, (peak, alone)
    assert str(Explanation(made))


MAPPED = """
import tempfile
import torch
from safetensors.torch import load_file, save_file
from torch import nn

with tempfile.TemporaryDirectory() as folder:
    save_file(nn.Linear(512, 512).state_dict(), f"{folder}/weights.safetensors")
    with torch.device("meta"):
        net = nn.Linear(512, 512)
    net.load_state_dict(load_file(f"{folder}/weights.safetensors"), assign=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        net(torch.randn(8, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_weights_that_no_allocator_sees_are_named(tmp_path):
    """What the note says is what the allocator has less."""
    path = tmp_path / "script.py"
    found = explained(path, MAPPED)
    [said] = [note for note in found.notes if "safetensors" in note]
    weights = (512 * 512 + 512) * 4
    assert said.startswith(f"{weights:,} bytes of the peak, loaded at script.py:11, are safetensors' file, mapped")
    assert found.timeline.peak - weights <= peak_of(path, 3) * 1.01
