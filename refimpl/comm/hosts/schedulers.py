"""What SLURM and MPI set, as the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR.

A script that `srun python train.py` starts on eight tasks is one training of eight ranks, and not eight trainings that
write to one folder.
"""

import os
import re
import socket

RANK_OF = {  # {whose: names of (world size, rank, rank on its host, ranks on its host)}
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
PORT = 29500  # torchrun's, too
PORTS = 20000  # for SLURM's jobs: one host may have tasks of several


def variables(environment=os.environ):
    """Return what torchrun would have set for this process, which SLURM or MPI has started among others; {} where it
    is alone, or where RANK is set.

    ValueError, naming the variable, where it is one of several and cannot be joined to the others.
    """
    if "RANK" in environment:
        return {}
    slurm = {name.removeprefix("SLURM_"): value for name, value in environment.items() if name.startswith("SLURM_")}
    if int(slurm.get("STEP_NUM_TASKS") or slurm.get("NTASKS") or 1) > 1:
        found = _of_slurm(slurm)
    else:
        whose = next((each for each, names in RANK_OF.items() if int(environment.get(names[0], 1)) > 1), None)
        found = _of_mpi(environment, whose) if whose else {}
    return {name: str(environment.get(name, value)) for name, value in found.items() if value is not None}


def _of_slurm(slurm):
    size, rank = slurm.get("STEP_NUM_TASKS") or slurm["NTASKS"], slurm.get("PROCID")
    hosts = slurm.get("STEP_NODELIST") or slurm.get("JOB_NODELIST")
    if rank in (None, "0") and not {"STEP_ID", "STEPID"} & slurm.keys():
        raise ValueError(f"SLURM_NTASKS={size}, and this process was not started by srun, so it would wait for "
                         f"{int(size) - 1} others: write `srun python …` in the batch file; or unset SLURM_NTASKS to "
                         "start all ranks on this host")
    if rank is None or not hosts:
        raise ValueError(f"SLURM has {size} tasks, and SLURM_PROCID={rank!r}, SLURM_JOB_NODELIST={hosts!r}: expected "
                         "both, or RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in their place")
    counts = _tasks_of(slurm.get("STEP_TASKS_PER_NODE") or slurm.get("TASKS_PER_NODE", ""))
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": slurm.get("LOCALID"), "MASTER_ADDR": first_host(hosts),
            "LOCAL_WORLD_SIZE": dict(enumerate(counts)).get(int(slurm.get("NODEID", 0))),
            "MASTER_PORT": PORT + 1 + int(slurm.get("JOB_ID", 0)) % PORTS}


def first_host(hosts):
    """Return the first name of SLURM's list of hosts: of "gpu[03-06,9],cpu1" it is "gpu03"."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)[0])


def _tasks_of(counts):
    """Read SLURM's number of tasks on each host: of "2(x2),1" they are [2, 2, 1]."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each) for each in counts.split(",") if each]
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def _of_mpi(environment, whose):
    size_of, rank_of, local_of, here_of = RANK_OF[whose]
    size, rank, here = (environment.get(name) for name in (size_of, rank_of, here_of))
    if rank is None:
        raise ValueError(f"{size_of}={size}, and {rank_of} is not set: expected both, or RANK, WORLD_SIZE, LOCAL_RANK "
                         "and MASTER_ADDR in their place")
    if "MASTER_ADDR" not in environment and here != size:
        raise ValueError(f"{whose} has started {size} ranks ({size_of}), and does not say where rank 0 is: set "
                         f"MASTER_ADDR to its host on all of them (mpirun -x MASTER_ADDR={socket.gethostname()})")
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": environment.get(local_of), "LOCAL_WORLD_SIZE": here,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
