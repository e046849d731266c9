"""The user's own line for what is made, in forward and in backward; and that finding it stays cheap."""

import inspect

import torch
from outside_programs import PROGRAMS
from outside_reading import second_step

from refimpl import memory
from refimpl.checkpointing import checkpoint
from refimpl.memory.tracking import lines


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x):
        hidden = self.up(x)
        return hidden.sigmoid().cumsum(0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cosh()


def run(net):
    """{operation: {text of the line of each storage that it made}}."""
    optimizer, x = torch.optim.AdamW(net.parameters(), foreach=False), torch.ones(4, 8)
    with memory.track(net) as t:
        y = Doubled.apply(net(x))
        y.register_hook(lambda gradient: gradient.neg())
        y.square().sum().backward()
        optimizer.step()
    found = {}
    for record in t.records:
        if record.line is not None:
            found.setdefault(record.op, set()).add(record.line.text)
    return found


def test_each_allocation_has_the_users_line():
    found = run(Net())
    assert found["addmm"] == {"hidden = self.up(x)"} and found["cumsum"] == {"return hidden.sigmoid().cumsum(0)"}
    # In backward: the line whose node it is; of a Function or a hook, its own.
    assert found["sigmoid_backward"] == {"return hidden.sigmoid().cumsum(0)"}
    assert found["mm"] == {"hidden = self.up(x)"} and found["cosh"] == {"return gradient.cosh()"}
    assert found["neg"] == {"y.register_hook(lambda gradient: gradient.neg())"}
    assert "y.square().sum().backward()" in found["ones_like"] and found["sqrt"] == {"optimizer.step()"}


def test_without_the_nodes_a_backward_is_one_line(monkeypatch):
    monkeypatch.setattr(lines.Lines, "_of_node", lambda self: (None, None))
    found = run(Net())
    assert found["mm"] == found["sigmoid_backward"] == {"y.square().sum().backward()"}


def test_what_is_computed_again_has_the_line_that_computes_it():
    net = Net()
    with memory.track(net) as t:
        checkpoint(net, torch.ones(4, 8, requires_grad=True)).sum().backward()
    again = {record.line.text for record in t.records if record.op == "sigmoid" and record.phase == "backward"}
    assert again == {"return hidden.sigmoid().cumsum(0)"}


def test_of_a_librarys_model_the_user_has_one_line_and_the_library_many():
    made = [record for record in second_step(PROGRAMS["gpt2"]).records if record.line is not None]
    assert {record.line.file.rpartition("/")[2] for record in made} == {"loops.py"}
    files = {record.source.file for record in made}
    assert "transformers/models/gpt2/modeling_gpt2.py" in files and "transformers/pytorch_utils.py" in files
    assert all(str(r.source).startswith("transformers/") for r in made if (r.phase, r.op) == ("backward", "mm"))


class Counted(dict):
    """Counts the frames that were looked at."""
    looked = 0

    def get(self, path):
        self.looked += 1
        return super().get(path)


def frames_walked(depth, monkeypatch):
    """Frames looked at in all, under `depth` modules of PyTorch's."""
    net = torch.nn.GELU()
    for _ in range(depth):
        net = torch.nn.Sequential(net, torch.nn.Identity())
    with monkeypatch.context() as patch:
        patch.setattr(lines, "_kinds", Counted(lines._kinds))
        with memory.track(net) as t:
            net(torch.ones(2, requires_grad=True))
        assert [r.line.text for r in t.records if r.op == "gelu"] == ["net(torch.ones(2, requires_grad=True))"]
        return lines._kinds.looked


def test_a_walk_is_no_longer_in_a_deep_model(monkeypatch):
    """Each module adds its own few frames once (two modules a level), and not once for every operation below it."""
    shallow, deep = frames_walked(5, monkeypatch), frames_walked(40, monkeypatch)
    assert (deep - shallow) / 35 < 2 * 8
    monkeypatch.setattr(lines.Lines, "enter_module", lambda self: self._calls.append((None, None, None)))
    assert frames_walked(40, monkeypatch) > 100  # one operation alone, without what modules remember


def test_a_line_is_named_as_on_every_machine():
    here = inspect.currentframe().f_lineno
    with memory.track() as t:
        torch.zeros(3)
    (line, nbytes), = t.top(by="line")
    assert line == f"tests/memory/tracking/test_lines.py:{here + 2}: torch.zeros(3)" and nbytes == 12


def test_a_file_that_was_edited_since_shows_its_new_text(tmp_path):
    path = tmp_path / "train.py"
    for text in ("x = 1", "longer = 2"):
        path.write_text(text)
        lines.begin_program(path)
        assert lines.line_of(str(path), 1).text == text
