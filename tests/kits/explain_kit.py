"""Scripts run in this process as `refimpl explain` runs them, and what their techniques saved when switched on."""

from pathlib import Path

import outside  # noqa: F401 - before anything imports torchvision

from refimpl.explain import Explanation, Script, run
from refimpl.explain.helps import helps
from refimpl.explain.recorded_timeline import RecordedTimeline

PROGRAMS = Path(__file__).parents[1] / "explain" / "programs"
HELD_BACK = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4096))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    out = model(torch.randn(512, 256))
    loss = (out - 1).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def helps_of(timeline):
    """{name: Help}."""
    return {each.name: each for each in helps(timeline)}


class Program:
    """One of the programs, run for two steps; `promised(name)` and `saved(name)`: bytes of a technique."""

    def __init__(self, name, done=True):
        self.path, self.done = PROGRAMS / f"{name}.py", done
        self.timeline = self.run()
        self.helps = helps_of(self.timeline)

    def run(self, *arguments, switch=None):
        made = run(Script(self.path, arguments), 2, switch)
        assert made.done == self.done and made.status == 0, made.ending.text
        assert switch is None or made.switched.applied, made.switched.refused
        return RecordedTimeline(made.recording)

    def promised(self, name):
        return self.helps[name].saves

    def saved(self, name, *arguments):
        """By how much the last step's peak is lower with the technique on; `arguments` are the program's own switch."""
        return self.timeline.last_peak - self.run(*arguments, switch=None if arguments else name).last_peak


def held(promised, saved):
    """Whether a promise holds: within 5 %."""
    return promised > 0 and abs(promised - saved) <= 0.05 * saved


def recorded(path, text, *arguments, switch=None):
    """Write a script to `path` and return the RecordedTimeline of two of its steps."""
    path.write_text(text)
    made = run(Script(path, arguments), 2, switch)
    assert made.done, made.ending.text
    return RecordedTimeline(made.recording)


def explained(path, text, changes=(), steps=3):
    """Write a script to `path`, with (old, new) texts exchanged, and return the Explanation of its run."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return Explanation(run(Script(path, ()), steps))
