"""What SLURM and MPI set, as torchrun's variables; or the name of what is missing."""

import pytest

from refimpl.comm.hosts.schedulers import first_host, variables

SLURM = {"SLURM_NTASKS": "5", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1",
         "SLURM_JOB_NODELIST": "gpu[03-05]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "12"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def test_slurm_s_tasks():
    expected = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu03",
                "MASTER_PORT": "29513"}
    assert variables(SLURM) == expected
    assert variables(SLURM | {"MASTER_PORT": "1234", "MASTER_ADDR": "x"}) == expected | {"MASTER_PORT": "1234",
                                                                                        "MASTER_ADDR": "x"}


@pytest.mark.parametrize(("hosts", "first"), [("a", "a"), ("a1,b2", "a1"), ("gpu[03-06,9],cpu1", "gpu03"),
                                             ("n[1,3]-ib", "n1-ib"), ("r[1-2]n[07-08]", "r1n07")])
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_mpi_s_processes():
    assert variables(OPEN_MPI | {"MASTER_ADDR": "a"}) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
        "MASTER_PORT": "29500"}
    assert variables(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})["MASTER_ADDR"] == "127.0.0.1"
    assert variables({"PMI_SIZE": "2", "PMI_RANK": "1", "MASTER_ADDR": "a"})["RANK"] == "1"


@pytest.mark.parametrize("alone", [{}, {"RANK": "0", **SLURM}, {"SLURM_NTASKS": "1"}, {"PMI_SIZE": "1"}])
def test_who_is_alone_or_has_been_told_is_left_so(alone):
    assert variables(alone) == {}


@pytest.mark.parametrize(("given", "words"), [
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8, and this process was not started by srun"),
    (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST='': expected both"),
    (OPEN_MPI, "Open MPI has started 4 ranks .* set MASTER_ADDR to its host on all of them"),
    ({"PMI_SIZE": "2"}, "PMI_SIZE=2, and PMI_RANK is not set")])
def test_what_cannot_be_joined_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        variables(given)
