"""Ranks that nothing connects; and what a launch needs of its caller's directory."""

import inspect
import re
from pathlib import Path

import pytest

from refimpl import ranks
from refimpl.comm import launch
from refimpl.ranks import RankError, World, run
from refimpl.ranks.running import unpack


def test_ranks_know_no_communicator():
    for path in Path(ranks.__file__).parent.glob("*.py"):
        imported = re.findall(r"(?m)^ *(?:from|import) +(refimpl\S*|\.\.\S*)", path.read_text())
        assert {*imported} <= {"..common.lazy"}, path


def test_a_world_that_connects_nothing():
    assert run(lambda rank, offset: rank + offset, World(3), (10,)) == [10, 11, 12]
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError"):
        run(lambda rank: 1 / (1 - rank), World(2))


def test_ranks_that_nothing_connects_are_waited_for_as_long_as_those_of_a_launch():
    own, launched = (inspect.signature(each).parameters["timeout"].default for each in (run, launch))
    assert own == launched


def test_a_result_that_cannot_be_unpickled_is_named():
    with pytest.raises(RankError, match="rank 3 returned a value that cannot be unpickled: UnpicklingError") as caught:
        unpack(3, b"no pickle")
    assert caught.value.ranks == (3,)


def test_a_directory_that_was_deleted_is_told_before_anything_starts(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="was deleted: os.chdir"):
        launch(print, 1)
