"""`refimpl estimate`: what it prints, as text and as JSON, and how it ends when it is asked for what cannot be."""

import json

import pytest
from estimate_kit import BUILD

from refimpl import cli
from refimpl.estimate import estimate
from refimpl.estimate.report import LIBRARIES, verdict


def test_text_and_json_say_what_the_estimate_says(names, capsys):
    found = estimate(names["gpt"], batch=2, sequence=16, gpu="t4", zero=1, gpus=2)
    asked = ["estimate", names["gpt"], "--batch", "2", "--sequence", "16", "--gpu", "t4", "--zero", "1", "--gpus", "2"]
    cli.main(asked)
    said = capsys.readouterr().out
    assert f"{found.parameters:,} parameters, built by build.py" in said and "2 × 16 tokens on each of 2 GPUs" in said
    assert repr(found.peak) in said and "exact: every tensor of rank 0 of 2" in said and "bounded: " in said
    assert said.splitlines()[-1].startswith("t4 has 15.0 GiB: fits, 15.0 GiB left for the CUDA context")
    cli.main([*asked, "--json"])
    read = json.loads(capsys.readouterr().out)
    assert read["peak"] == {**found.peak, "total": found.peak.total} and read["options"]["zero"] == 1
    assert read["gpu"]["fits"] is True and read["exact"] == found.exact and read["reserved"] == found.reserved


def test_the_verdict(names):
    found = estimate(names["regression"], gpu="t4")
    found.reserved = found.gpu.reported_bytes + 2**30
    assert found.fits is False and verdict(found) == "t4 has 15.0 GiB: does not fit, 1.0 GiB too much"
    found.reserved = found.gpu.reported_bytes - LIBRARIES // 2
    assert found.fits and verdict(found).startswith("t4 has 15.0 GiB: may not fit, 512.0 MiB left")


@pytest.mark.parametrize(("arguments", "message"), [
    (["gpt2", "--zero", "4"], "argument --zero: invalid value: '4': expected 0 (data parallel), 1, 2 or 3"),
    (["gpt2", "--gpus", "0"], "argument --gpus: invalid value: '0': expected a whole number of at least 1"),
    (["gpt2", "--batch", "1.5"], "argument --batch: invalid value: '1.5': expected a whole number"),
    (["gpt2", "--precision", "fp8"], "invalid choice: 'fp8'"), (["gtp2"], "unknown model 'gtp2'; close names: gpt2"),
    (["gpt2", "--gpu", "h300"], "unknown hardware 'h300'"), (["none.json"], "no file none.json: expected a name of"),
    (["none.py:build"], "no file none.py: expected file.py:function"), (["build.py"], "no file build.py"),
    ([__file__], "expected the function, too"), ([__file__ + ":write", "--attention", "sdpa"], "set it there")])
def test_what_cannot_be_ends_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["estimate", *arguments])
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_cannot_be_imported_is_named_with_its_line(tmp_path, capsys):
    (tmp_path / "model.py").write_text("import torch\nraise KeyError('three')\ndef build():\n    pass\n")
    with pytest.raises(SystemExit) as done:
        cli.main(["estimate", f"{tmp_path / 'model.py'}:build"])
    said = capsys.readouterr().err
    assert done.value.code == 2 and "model.py:2: " in said and "raises KeyError when it is imported" in said


def test_a_file_without_the_function_is_not_imported(tmp_path, capsys):
    path = tmp_path / "model.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef built():\n    pass\n")
    for text, words in ((path.read_text(), "has no function 'build'; it has built"), ("def (", "py is not Python")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            cli.main(["estimate", f"{path}:build"])
        assert words in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_name_that_a_star_import_brings_is_found(tmp_path):
    (tmp_path / "inner.py").write_text(BUILD)
    (tmp_path / "outer.py").write_text("from inner import *\n")
    assert estimate(f"{tmp_path / 'outer.py'}:gpt").parameters == estimate(f"{tmp_path / 'inner.py'}:gpt").parameters


def test_its_help_explains_every_choice(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["estimate", "--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and "bf16-master" in said and "keeps no scores" in said and "--recompute" in said
