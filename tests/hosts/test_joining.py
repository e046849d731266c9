"""What ranks are told that do not come together: which host, what was expected, what to set."""

import pytest
from hosts_kit import PORT, Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MEET = """
import os
import refimpl.comm.hosts.joining as joining
import refimpl.comm.hosts.facts as facts
from refimpl.comm import launch

joining.JOIN, joining.SAY = 3, 1
OTHERWISE
def fn(comm):
    comm.barrier()
    return comm.rank, [(name, ranks) for name, ranks in comm.hosts.groups().items()], comm.hosts.facts[0]["ranks_here"]
print(launch(fn, RANKS), flush=True)
"""


def meet(otherwise="", world='int(os.environ["WORLD_SIZE"])'):
    return MEET.replace("OTHERWISE", otherwise).replace("RANKS", world)


def said(tmp_path, code=None, names=(), ranks=1, own_address=None, **how):
    with Hosts(tmp_path / "h", *names, own_address=own_address) as hosts:
        run = hosts.run(code or meet(), ranks, **{"how": "forked", **how})
        done = run.wait(40)
    assert None not in [each.code for each in done.values()], run.text
    return done


def test_slurm_s_tasks_are_one_world(tmp_path):
    done = said(tmp_path, meet(world='int(os.environ["SLURM_NTASKS"])'), ranks=(2, 1), how="slurm")
    groups = "[('hosta', [0, 1]), ('hostb', [2])]"
    for each in done.values():
        assert f"[(0, {groups}, 2), (1, {groups}, 2), (2, {groups}, 2)]" in each.text


def test_tasks_that_cannot_be_joined_are_refused(tmp_path):
    given = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE"))
    done = said(tmp_path, meet(world="2"), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0",
                OMPI_COMM_WORLD_LOCAL_SIZE="1", **given)
    for name, each in done.items():
        assert each.code == 1
        assert ("ValueError: Open MPI has started 2 ranks (OMPI_COMM_WORLD_SIZE), and does not say where rank 0 is: "
                f"set MASTER_ADDR to its host on all of them (mpirun -x MASTER_ADDR={name})") in each.text


@pytest.mark.parametrize(("line", "what", "advice"), [
    ("import torch; torch.__version__ = '2.11.0'", "torch: 2.13.0 on rank 0 (hosta); 2.11.0 on rank 1 (hostb)",
     "Install the same version on every host"),
    ("import platform; platform.python_version_tuple = lambda: ('3', '12', '1')", "python: ", "3.12 on rank 1 (hostb)"),
    ("# another", "script: script.py ", "Copy the same file to every host"),
    ("facts._digest_of_package = lambda: 'sources ffff'", "refimpl: ", "sources ffff on rank 1 (hostb). Install"),
    ("os.environ['WORLD_SIZE'] = '3'", "world size: 2 on rank 0 (hosta); 3 on rank 1 (hostb)",
     "Set the same WORLD_SIZE")])
def test_a_host_that_differs(tmp_path, line, what, advice):
    same = f"if os.uname().nodename == 'hostb': {line}" if line[0] != "#" else ""
    done = said(tmp_path, meet(same), codes={} if same else {"hostb": meet(line)})
    for each in done.values():
        assert each.code and f"RankError: ranks differ in {what}" in each.text and advice in each.text, each.text


def test_an_own_name_that_stands_for_itself_alone(tmp_path):
    done = said(tmp_path, own_address={"hostb": "127.0.1.1"})
    for each in done.values():
        assert "RankError: rank 1 (hostb): there the host's own name stands for 127.0.1.1, which other hosts cannot " \
               "reach (\"Connection refused\" would follow). Set GLOO_SOCKET_IFNAME to the interface" in each.text
        assert "(eth0), or let /etc/hosts" in each.text
    done = said(tmp_path / "set", own_address={"hostb": "127.0.1.1"}, GLOO_SOCKET_IFNAME="eth0")
    assert {each.code for each in done.values()} == {0}


def test_a_port_that_is_in_use(tmp_path):
    used = f"import socket; kept = socket.create_server(('', {PORT})) if os.uname().nodename == 'hosta' else 0"
    done = said(tmp_path, meet(used))
    assert f"rank 0 (hosta): MASTER_PORT={PORT} is in use on this host" in done["hosta"].text
    assert "Set another one, the same on every host (torchrun --master-port)" in done["hosta"].text
    assert f"rank 1 (hostb) found no torch store at MASTER_ADDR=hosta (10.77.0.1), MASTER_PORT={PORT}" in done[
        "hostb"].text


@pytest.mark.parametrize(("own", "words"), [
    ({"MASTER_PORT": "29999"}, "MASTER_ADDR=hosta (10.77.0.1), MASTER_PORT=29999 within 3 s"),
    ({"MASTER_ADDR": "hostz"}, "MASTER_ADDR=hostz (a name that this host does not know), MASTER_PORT="),
    ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost (127.0.0.1, this host itself), MASTER_PORT="),
    ({"MASTER_PORT": "many"}, "MASTER_PORT='many': expected a port from 1 to 65535, the same on every host")])
def test_a_wrong_way_to_the_store(tmp_path, own, words):
    done = said(tmp_path, own={"hostb": own})
    assert words in done["hostb"].text
    assert "ranks [1] of 2 have not begun after 3 s; hosta has rank 0. Expected WORLD_SIZE=2" in done["hosta"].text


def test_two_ranks_of_one_number(tmp_path):
    done = said(tmp_path, own={"hostb": {"RANK": "0", "WORLD_SIZE": "3"}, "hostc": {"RANK": "1"}}, WORLD_SIZE="3",
                names=("hosta", "hostc", "hostb"))
    assert "RankError: rank" in done["hosta"].text


def test_two_ranks_above_0_of_one_number(tmp_path):
    done = said(tmp_path, own={"hostc": {"RANK": "1"}}, names=("hosta", "hostb", "hostc"))
    for each in done.values():
        assert "RankError: rank 1 is there twice: process " in each.text
        assert " on hostb" in each.text and " on hostc" in each.text and "another --node-rank on each host" in each.text


def test_a_world_that_is_never_complete(tmp_path):
    done = said(tmp_path, WORLD_SIZE="4")
    for each in done.values():
        assert ("RankError: ranks [2, 3] of 4 have not begun after 3 s; hosta has rank 0, hostb has rank 1. Expected "
                f"WORLD_SIZE=4 processes with MASTER_ADDR=hosta and MASTER_PORT={PORT}: start those on the other "
                "hosts, or set WORLD_SIZE to what runs") in each.text
