"""The idea in one screen beside the package's ring and collectives: the same sums, to the byte the same traffic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ring_bodies
from one_screen import check_paper


@pytest.fixture(scope="module")
def found(request):
    """{task: what went wrong} of the tasks that are asked for."""
    asked = [item.callspec.params["name"] for item in request.session.items
             if item.path == request.path and hasattr(item, "callspec")]
    path = Path(ring_bodies.__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (path.parents[2], path.parent)))}
    run = subprocess.run([sys.executable, path, *asked], capture_output=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ring_bodies.TASKS)
def test_in_a_process_of_its_own(name, found):
    assert found[name] == ""


def test_one_screen_that_is_read_first():
    check_paper("comm", "collectives")
