"""What ranks are told that do not come together: which host, what was expected, what to set."""

import re

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


USED = f"import socket; kept = socket.create_server(('', {PORT})) if os.uname().nodename == 'hosta' else 0"
MISSING = "ranks [1] of 2 have not begun after 3 s; hosta has rank 0. Expected WORLD_SIZE=2"
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE"))}
TWICE = "RankError: rank 1 is there twice: process .* on host[bc] and process .* on host[bc] have RANK=1. Give each " \
        ".* another --node-rank on each host"
FAULTS = {  # {what: (how it is run, {host: what it says}, or what all say)}
    "tasks of MPI on several hosts": (
        {"code": meet(world="2"), **OPEN_MPI}, "ValueError: Open MPI has started 2 ranks .OMPI_COMM_WORLD_SIZE., and "
        "does not say where rank 0 is: set MASTER_ADDR to its host on all of them .mpirun -x MASTER_ADDR=host"),
    "a port in use": ({"code": meet(USED)}, {
        "hosta": f"rank 0 .hosta.: MASTER_PORT={PORT} is in use on this host.* Set another one, the same on every host",
        "hostb": f"rank 1 .hostb. found no torch store at MASTER_ADDR=hosta .10.77.0.1., MASTER_PORT={PORT}"}),
    "another port": ({"own": {"hostb": {"MASTER_PORT": "29999"}}}, {
        "hosta": re.escape(MISSING), "hostb": "MASTER_ADDR=hosta .10.77.0.1., MASTER_PORT=29999 within 3 s"}),
    "a host that is none": ({"own": {"hostb": {"MASTER_ADDR": "hostz"}}}, {
        "hosta": re.escape(MISSING), "hostb": "MASTER_ADDR=hostz .a name that this host does not know., MASTER_PORT="}),
    "itself": ({"own": {"hostb": {"MASTER_ADDR": "localhost"}}}, {
        "hosta": re.escape(MISSING), "hostb": "MASTER_ADDR=localhost .127.0.0.1, this host itself., MASTER_PORT="}),
    "no port": ({"own": {"hostb": {"MASTER_PORT": "many"}}}, {
        "hosta": re.escape(MISSING), "hostb": "MASTER_PORT='many': expected a port from 1 to 65535, the same on"}),
    "two ranks 0": ({"own": {"hostb": {"RANK": "0", "WORLD_SIZE": "3"}, "hostc": {"RANK": "1"}}, "WORLD_SIZE": "3",
                     "names": ("hosta", "hostc", "hostb")}, {"hosta": "RankError: rank"}),
    "two ranks 1": ({"own": {"hostc": {"RANK": "1"}}, "names": ("hosta", "hostb", "hostc")}, TWICE),
    "a world that is never complete": ({"WORLD_SIZE": "4"}, re.escape(
        "RankError: ranks [2, 3] of 4 have not begun after 3 s; hosta has rank 0, hostb has rank 1. Expected "
        f"WORLD_SIZE=4 processes with MASTER_ADDR=hosta and MASTER_PORT={PORT}: start those on the other hosts, or set "
        "WORLD_SIZE to what runs"))}


@pytest.mark.parametrize("what", FAULTS)
def test_ranks_that_do_not_meet(tmp_path, what):
    how, words = FAULTS[what]
    done = said(tmp_path, **how)
    for host, expected in (words if isinstance(words, dict) else dict.fromkeys(done, words)).items():
        assert done[host].code and re.search(expected, done[host].text), done[host].text
