"""A user's file is imported once, beside the files of its folder, and leaves nothing in the search path."""

import sys

import pytest

from refimpl.estimate import Options
from refimpl.estimate.users import source


def test_the_folder_of_a_file_is_in_the_search_path_while_it_is_imported_alone(tmp_path):
    (tmp_path / "beside_it.py").write_text("import torch\nlayer = torch.nn.Linear(3, 2)")
    (tmp_path / "build.py").write_text("import torch, beside_it\n"
                                       "def build(batch): return beside_it.layer, torch.zeros(batch, 3)")
    (tmp_path / "fails.py").write_text("import beside_it\nraise KeyError('x')\ndef build(): pass")
    before = list(sys.path)
    model, args, _ = source(f"{tmp_path / 'build.py'}:build", Options(batch=5)).build()
    assert model is sys.modules.pop("beside_it").layer and args[0].shape == (5, 3)
    assert sys.path == before
    with pytest.raises(ValueError, match=r"fails.py raises KeyError when it is imported: 'x'"):
        source(f"{tmp_path / 'fails.py'}:build", Options())
    assert sys.path == before and sys.modules.pop("beside_it")
