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
    if int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", 1))) > 1:
        found = _of_slurm(environment)
    else:
        whose = next((each for each, names in RANK_OF.items() if int(environment.get(names[0], 1)) > 1), None)
        found = _of_mpi(environment, whose) if whose else {}
    return {name: str(environment.get(name, value)) for name, value in found.items()}


def _of_slurm(environment):
    size = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    rank, hosts = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NODELIST",
                                                                   environment.get("SLURM_JOB_NODELIST",
                                                                                   environment.get("SLURM_NODELIST")))
    outside = "SLURM_STEP_ID" not in environment and "SLURM_STEPID" not in environment and rank in (None, "0")
    if outside:
        raise ValueError(f"SLURM_NTASKS={size}, and this process was not started by srun, so it would wait for "
                         f"{int(size) - 1} others: write `srun python …` in the batch file; or unset SLURM_NTASKS to "
                         "start all ranks on this host")
    if rank is None or not hosts:
        raise ValueError(f"SLURM has {size} tasks, and SLURM_PROCID={rank!r}, SLURM_JOB_NODELIST={hosts!r}: expected "
                         "both, or RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in their place")
    here = int(environment.get("SLURM_NODEID", 0))
    counts = _tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")))
    found = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": first_host(hosts),
             "MASTER_PORT": PORT + 1 + int(environment.get("SLURM_JOB_ID", 0)) % PORTS}
    if "SLURM_LOCALID" in environment:
        found["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    return found | ({"LOCAL_WORLD_SIZE": counts[here]} if here < len(counts) else {})


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
    found = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    found |= {"LOCAL_RANK": environment[local_of]} if local_of in environment else {}
    return found | ({"LOCAL_WORLD_SIZE": here} if here else {})
