"""A rank that fails anywhere in a step or a save: all end within 5 s, it is named with its place, and the checkpoint on
disk is whole.

Each of five faults strikes in each of five places, on one of three meshes; with REFIMPL_ALL_FAULTS=1 on each of them.
"""

import itertools
import os
import time

import pytest
from fault_kit import FAULTS, MESHES, PLACES, STRIKES, VICTIM, struck
from patience import patiently, within
from together_kit import engine_of

from refimpl.comm import FakeCommunicator, RankError
from refimpl.engine import launch as launch_on
from refimpl.mesh import Mesh

pytestmark = pytest.mark.faults
EVERY = list(itertools.product(enumerate(FAULTS), enumerate(PLACES), enumerate(MESHES)))
CASES = [(fault, place, axes) for (i, fault), (j, place), (k, axes) in EVERY
         if (i + j) % len(MESHES) == k or os.environ.get("REFIMPL_ALL_FAULTS") == "1"]


@pytest.mark.parametrize(("fault", "place", "axes"), CASES)
@patiently
def test_all_ranks_end_and_the_one_to_blame_is_named_with_its_place(fault, place, axes, tmp_path, capfd):
    mesh = Mesh(**axes)
    with pytest.raises(RankError) as failed:
        launch_on(struck, mesh, fault, place, tmp_path / "state", timeout=2)
    ended = time.time()
    text = capfd.readouterr().out
    began = float(text[text.index(STRIKES) :].split()[2])
    within(ended - began, 5)
    assert failed.value.ranks == (VICTIM,) and mesh.describe(VICTIM) in str(failed.value)
    engine = engine_of(FakeCommunicator(0, 1), "gpt", {}, seed=7)
    engine.load(tmp_path / "state")  # which reads and verifies all of it
    assert engine.steps == 1
