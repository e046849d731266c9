"""`refimpl check`: what is recorded is held, what grew is named, and a bad file says which key."""

import sys
import tomllib

import pytest

from refimpl import cli

SCRIPT = """
import sys, torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    for _ in range(3):
        model(torch.randn(int(sys.argv[1] if len(sys.argv) > 1 else 512), 256)).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
if __name__ == "__main__":
    step()
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["refimpl"])
    def check(text=None, *options):
        path = tmp_path / "memory.toml"
        if text is not None:
            path.write_text(text)
        status = 0
        try:
            cli.main(["check", str(path), *options])
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr(), path
    return check


def test_recorded_held_grown(check):
    status, said, path = check("script = 'train.py'  # ours\ntolerance = 0.01\n", "--record")
    recorded = tomllib.loads(path.read_text())["recorded"]
    assert status == 0 and "# ours" in path.read_text() and recorded["peak"] == sum(
        nbytes for name, nbytes in recorded.items() if name not in ("peak", "torch") and "peak_of" not in name)
    status, said, _ = check()
    assert status == 0 and "+0.0% (tolerance 1.0%)" in said.out
    status, said, _ = check("arguments = ['1024']\n" + path.read_text())
    assert status == 1 and "the peak has grown" in said.err and "temporaries +" in said.err
    status, _, _ = check(None, "--record")
    assert status == 0 and path.read_text().count("[recorded]") == 1 and check()[0] == 0


def test_a_phase_that_grows_below_the_peak(check):
    """The peak is the optimizer's step: a batch that is larger by half shows in forward and backward alone."""
    script = SCRIPT.replace("optim.SGD(model.parameters(), lr=0.1)", "optim.Adam(model.parameters(), foreach=True)")
    status, _, path = check("script = 'train.py'\narguments = ['16']\n", "--record")
    path.with_name("train.py").write_text(script)
    assert check(None, "--record")[0] == 0
    recorded = tomllib.loads(path.read_text())["recorded"]
    assert recorded["peak"] == recorded["peak_of_optimizer"] > 1.2 * recorded["peak_of_backward"]
    status, said, _ = check(path.read_text().replace("['16']", "['17']"))
    assert status == 0, said.err  # of each phase less than a hundredth
    status, said, _ = check(path.read_text().replace("['17']", "['24']"))
    assert status == 1 and "but in other phases more is taken" in said.err
    assert f"{recorded['peak_of_forward']:,} recorded" in said.err and "optimizer" not in said.err
    older = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("peak_of_"))
    assert check(older)[0] == 0  # recorded before there were phases


def test_a_function_and_a_script_that_fails(check):
    status, said, path = check("function = 'train.py:step'", "--record")
    assert status == 0 and "recorded in" in said.out
    status, said, _ = check("script = 'train.py'\narguments = ['none']\n[recorded]\npeak = 1\n")
    assert status == 1 and "invalid literal for int()" in said.err and "after no optimizer step" in said.err
    status, said, _ = check("function = 'train.py:stop'\n[recorded]\npeak = 1\n")
    assert status == 1 and "has no function stop" in said.err


@pytest.mark.parametrize(("text", "words"), [
    ("script = 3", "script = 3: expected a path"), ("script 'x'", "is no TOML"),
    ("script = 'train.py'\nstep = 2", "step = 2: no such key; expected script, function"),
    ("script = 'train.py'\nsteps = 0", "steps = 0: expected a whole number, 1 or more"),
    ("script = 'train.py'\ntolerance = 2", "tolerance = 2: expected a share"),
    ("script = 'train.py'\narguments = '--x'", "arguments = '--x': expected a list of texts"),
    ("steps = 2", "expected script"), ("script = 'a.py'\nfunction = 'a.py:b'", "one of them"),
    ("function = 'train.py'", "'train.py': expected a file and a function in it"),
    ("script = 'other.py'", "no file"), ("script = 'train.py'", "has no [recorded] yet: run with --record"),
    ("script = 'train.py'\n[recorded]\npeak = 'x'", "recorded = {'peak': 'x'}: expected a table")])
def test_a_bad_file_says_which_key(check, text, words):
    status, said, _ = check(text)
    assert status == 2 and words in said.err
