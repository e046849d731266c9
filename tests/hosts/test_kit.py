"""The kit's hosts are apart, and what they run trains as on one machine."""

import os
import time

import psutil
import pytest
from hosts_kit import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SUM = """
import os
import pathlib
import socket
import tempfile
import torch
from refimpl.comm import launch

def fn(comm):
    host = socket.gethostname()
    pathlib.Path("/tmp/mine").write_text(host)
    pathlib.Path("own").write_text(host)
    total = comm.all_reduce(torch.tensor(2 ** comm.rank))
    return host, total.item(), os.listdir("/tmp"), pathlib.Path("own").read_text()

for host, total, seen, own in launch(fn, int(os.environ["WORLD_SIZE"])):
    print(host, total, "mine" in seen, own)
"""


@pytest.mark.parametrize(("how", "ranks"), [("forked", 2), ("torchrun", 1)])
def test_hosts_are_apart(tmp_path, how, ranks):
    with Hosts(tmp_path / "h") as hosts:
        done = hosts.run(SUM, ranks=ranks, how=how).wait(60)
        sent = hosts.sent("hosta")
    assert {name: each.code for name, each in done.items()} == {"hosta": 0, "hostb": 0}, done
    total = 2 ** (2 * ranks) - 1
    for each in done.values():
        assert each.text.count(f"hosta {total} True hosta") == each.text.count(f"hostb {total} True hostb") == ranks**2
    assert sent > 1000
    assert "mine" not in os.listdir("/tmp")


def test_a_cable_that_is_out_and_a_host_that_is_off_are_silent(tmp_path):
    """No rank is told of either: what it sent is lost, and no connection is closed."""
    code = """
        import socket, time
        name = socket.gethostname()
        if name == "hosta":
            with socket.create_server(("", 5000)) as listener:
                other, _ = listener.accept()
                for _ in range(100):
                    print("got", other.recv(1), flush=True)
        else:
            time.sleep(0.3)
            with socket.create_connection(("hosta", 5000)) as other:
                for _ in range(100):
                    other.send(b"x")
                    time.sleep(0.1)
    """
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(code, how="forked")
        run.heard("got b'x'", 2)
        hosts.cut("hostb")
        time.sleep(0.2)
        before = len(run.lines["hosta"])
        time.sleep(0.5)
        assert len(run.lines["hosta"]) == before
        hosts.mend("hostb")
        run.heard("got b'x'", before + 2)
        hosts.power_off("hostb")
        time.sleep(0.3)
        assert run.wait(0)["hosta"].code is None and "got b''" not in run.text


def test_nothing_is_left_though_a_test_fails(tmp_path):
    with pytest.raises(AssertionError, match="has not begun|was not written"), Hosts(tmp_path / "h") as hosts:
        run = hosts.run("import time; print('here', flush=True); time.sleep(100)", how="forked")
        run.heard("here", 2)
        pids = [run.pid(rank) for rank in range(2)]
        run.heard("there", seconds=0.1)
    assert not any(map(psutil.pid_exists, pids))
