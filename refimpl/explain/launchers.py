"""A script that a launcher starts, `accelerate launch train.py` or `torchrun train.py`: run here, as one process."""

import socket
from pathlib import Path

from .script import Module, Script

RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")


def program(words, is_module=False):
    """Return what a command line names: a Script, a Module, or what one of the launchers would start.

    ImportError, OSError, RuntimeError or ValueError if that is not there or makes no sense; SystemExit for options that
    a launcher does not have, after its own words.
    """
    if is_module:
        name, *arguments = words
        return Module(name, arguments[arguments[:1] == ["--"] :])
    launcher = Path(words[0]).name
    if launcher == "accelerate" and words[1:2] == ["launch"]:
        return _of_accelerate(words[2:])
    return _of_torchrun(words[1:]) if launcher == "torchrun" else Script(words[0], words[1:])


def _of_accelerate(words):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    off = [name for name, is_on in (("DeepSpeed", asked.use_deepspeed), ("FSDP", asked.use_fsdp),
                                    ("Megatron-LM", asked.use_megatron_lm)) if is_on]
    processes, asked.num_processes, asked.num_machines = asked.num_processes or 1, 1, 1
    _, environment = prepare_simple_launcher_cmd_env(asked)
    return _launched(asked, environment, processes, off)


def _of_torchrun(words):
    from torch.distributed.run import determine_local_world_size, parse_args, parse_min_max_nnodes

    asked = parse_args(words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**dict.fromkeys(RANKS, "0"), **dict.fromkeys(SIZES, "1"), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": asked.rdzv_id}
    return _launched(asked, environment,
                     determine_local_world_size(asked.nproc_per_node) * parse_min_max_nnodes(asked.nnodes)[1])


def _launched(asked, environment, processes, off=()):
    found = (Module if asked.module else Script)(asked.training_script, asked.training_script_args)
    found.environment = environment
    found.notes = [f"{name} is not switched on: the script is read as it runs without it" for name in off]
    if processes > 1:
        found.notes.append(f"one rank of {processes} is read, as if it were alone: what is split among ranks, and what "
                           "they send, is not in the figures")
    return found
