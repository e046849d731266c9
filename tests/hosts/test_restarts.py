"""torchrun starts ranks anew (--max-restarts): they go on from the last checkpoint, and no old failure is theirs."""

import re

import pytest
from hosts_kit import PORT, Hosts, missing
from together_kit import alone

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TRAIN = """
import os, signal
from pathlib import Path
from together_kit import engine_of, run
from refimpl import saving
from refimpl.comm import launch

def fn(comm):
    engine, folder = engine_of(comm, "gpt", {"dp": 2}, zero=2), Path(os.environ["FOLDER"])
    if saving.exists(comm, folder):
        engine.load(folder)
    print("goes on from", engine.steps, flush=True)
    for step in range(engine.steps, 4):
        found = run(engine, 1, step)
        if step == 2 and comm.rank == int(os.environ["WHO"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            DIES
        engine.save(folder)
    return found

print("found", launch(fn, 2)[0], flush=True)
"""
KILLED, RAISES = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('on purpose')"
ELASTIC = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"hosta:{PORT}"]  # hosts there count other restarts


@pytest.mark.parametrize(("rank", "dies", "options"), [
    pytest.param(1, KILLED, [], id="killed"), pytest.param(1, KILLED, ELASTIC, id="killed, c10d"),
    pytest.param(0, RAISES, [], id="raises")])
def test_ranks_that_are_started_anew_go_on(tmp_path, rank, dies, options):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(TRAIN.replace("DIES", dies), options=["--max-restarts", "1", *options], WHO=str(rank),
                        FOLDER=str(hosts.shared / "saved"))
        done = run.wait(60)
    assert {each.code for each in done.values()} == {0}, run.text
    assert run.text.count("goes on from 0") == run.text.count("goes on from 2") == 2, run.text
    for each in done.values():
        loss, norm = re.search(r"found \[\(([\d.]+), ([\d.]+)\)\]", each.text).groups()
        assert (float(loss), float(norm)) == pytest.approx(tuple(alone("gpt", 4)[-1]), rel=1e-5)
