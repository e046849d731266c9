"""`refimpl rehearse SCRIPT --on h100,t4`: what a training script takes on GPUs that are not there."""

import argparse
import sys
from pathlib import Path

from ..common.ledger import human
from ..estimate.command import number
from ..explain.script import Module, check_file
from ..untrusted.text import one_line, print_json, print_text, refuse, size
from .rehearsing import CannotRehearse, device, rehearse

EXAMPLE = """examples:
  refimpl rehearse train.py --on h100
  refimpl rehearse --on a100-40,h100,t4 --steps 3 train.py --batch 8
  refimpl rehearse --budget 20GiB --snapshot memory.pickle train.py
  refimpl rehearse --world 8 train_fsdp.py

An option after SCRIPT is the script's if the script has one of that name. Peaks are those of all steps; "unused" is the
part of what is reserved that is not allocated. The exit status is the script's own, 0 once its steps are made."""


def add_arguments(parser):
    """Add the command's arguments to an argparse parser."""
    _add_options(parser, "")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, run as `python "
                        "-m` runs it; what follows is all its own")
    parser.add_argument("script", metavar="SCRIPT", help="a training script, run as it is")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")


def _add_options(parser, script):
    """Add the options that the text of a script does not have as well."""
    def add(name, **options):
        if f'"{name}"' not in script and f"'{name}'" not in script:
            parser.add_argument(name, **options)

    add("--on", default="h100", metavar="NAMES", help="GPUs of the catalog, with commas; default: h100")
    add("--gpus", type=number, default=1, metavar="N", help="how many the script sees; the fullest is printed")
    add("--world", type=number, metavar="N",
        help="for a script of torchrun's: be one of N ranks; the others are not there")
    add("--rank", type=int, default=0, metavar="R", help="which of them; default 0")
    add("--budget", type=size, metavar="SIZE", help="as 20GiB: give the GPU this much memory")
    add("--steps", type=number, default=2, metavar="K",
        help="end after K steps of its optimizers; default: 2, the first of which makes their state")
    add("--numbers", action="store_true", help="compute values on the CPU, slowly: where the script decides by them")
    add("--snapshot", metavar="FILE", help="write PyTorch's recording of the memory, of the last of NAMES")
    add("--json", action="store_true", help="print JSON; what the script prints goes to stderr")


def run(arguments, parser):
    """Rehearse on each GPU, print what each took, and end with the script's status."""
    try:
        script = Module(arguments.script).name if arguments.module else check_file(arguments.script)
        if not arguments.module:
            late = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
            _add_options(late, Path(script).read_text(errors="replace"))
            _, arguments.arguments = late.parse_known_args(arguments.arguments, arguments)
        devices = {name: device(name, arguments.gpus, arguments.budget) for name in arguments.on.split(",")}
        if not 0 <= arguments.rank < (arguments.world or 1):
            raise ValueError(f"--rank {arguments.rank}: expected 0 ≤ rank < the number of --world, which is "
                             f"{arguments.world or 'not given'}")
        if Path(script).name in ("torchrun", "accelerate", "deepspeed"):
            raise ValueError(f"{script} starts a process for each GPU: rehearse your script itself, with --world N")
        if arguments.snapshot and not Path(arguments.snapshot).absolute().parent.is_dir():
            raise ValueError(f"--snapshot {arguments.snapshot}: there is no such folder")
    except (ValueError, OSError) as error:
        refuse(parser, error)
    options = {key: getattr(arguments, key) for key in ("world", "rank", "steps", "numbers", "snapshot", "module")}
    found = {}
    try:
        for name, each in devices.items():
            if len(devices) > 1:
                print_text(f"{name}:", file=sys.stderr if arguments.json else None, flush=True)
            found[name] = rehearse(arguments.script, arguments.arguments, on=each, **options,
                                   stdout=sys.stderr if arguments.json else None)
    except CannotRehearse as error:
        print_text(f"refimpl rehearse: {error}", file=sys.stderr)
        sys.exit(1)
    if arguments.json:
        print_json(found)
    else:
        print_text("\n".join(["", *lines(found, devices, arguments.numbers)]))
    sys.exit(max(each["status"] for each in found.values()))


def lines(found, devices, numbers):
    """Yield what is printed: a table with a line for each GPU, errors, notes, and whose bytes they are."""
    yield f"{'on':<12} {'of':>11} {'allocated':>11} {'reserved':>11} {'unused':>7} {'left':>11}"
    for name, each in found.items():
        peak = {key: max((step[key] for step in each["steps"]), default=0) for key in ("allocated", "reserved")}
        unused = 1 - peak["allocated"] / peak["reserved"] if peak["reserved"] else 0.0
        left = devices[name]["memory"] - devices[name]["context"] - peak["reserved"]
        ends = f"  out of memory in step {each['out of memory']['step']}" if each["out of memory"] else ""
        yield (f"{name:<12} {human(devices[name]['memory']):>11} {human(peak['allocated']):>11} "
               f"{human(peak['reserved']):>11} {unused:>7.1%} {human(left):>11}{ends}")
    for name, each in found.items():
        if each["out of memory"]:
            failed = each["out of memory"]
            yield f"\n{name}: {one_line(failed['line'] or 'no line of the script')}\n{failed['message']}"
    first = max(found.values(), key=lambda each: each["made"])
    yield "\n" + one_line(made(first))
    if unknown := [name for name, each in devices.items() if not each["context"]]:
        yield (f"note: what CUDA's context takes of {', '.join(unknown)} was not read, and is in what is left: of an "
               "H200 it was 527 MiB")
    yield from (f"note: {one_line(note)}" for note in notes(first, numbers))
    yield first["words"] if not numbers else first["words"].replace("bytes only, no numbers,", "numbers from the CPU,")


def made(each):
    """Return one sentence that says how far the script came."""
    steps = ", ".join(f"{count} step{'s' * (count > 1)} of {name}" for name, count in each["by class"].items())
    ended = {"steps": "then ended", "end": "then ended by itself", "exit": f"then exited {each['said']}".strip(),
             "interrupt": "interrupted", "error": f"then failed: {each['said']}"}[each["ending"]]
    if each["out of memory"]:
        ended = "then ran out of memory"
    return f"{steps or 'no optimizer step'}, {ended}"


def notes(each, numbers):
    """Yield what may make the bytes of another run other ones."""
    if each["ending"] != "error" and not any(step["reserved"] for step in each["steps"]):
        yield ("the script took nothing of the device in this process: it may run on the CPU where it does not ask for "
               "device=\"cuda\"")
    if each["ending"] == "error" and not each["world"] and any(name in each["said"] for name in (
            "RANK", "WORLD_SIZE", "MASTER_ADDR", "process group")):
        yield "the script is one of several ranks, as under torchrun: --world N makes it one of N"
    if each["not saved"]:
        where = ", ".join(f"{place} ({count}×)" for place, count in each["not saved"].items())
        yield f"not done, since a device that computes nothing has nothing to keep: {where}"
    if each["new"] and not numbers:
        yield f"new files hold nothing of a run's: {', '.join(each['new'][:3])}{', …' * (len(each['new']) > 3)}"
    if any(name in each["said"] for name in ("CUSOLVER", "CUFFT")):
        yield "cuSOLVER and cuFFT are not on the device without kernels: have the script compute that on the CPU"
    if each["read"] and not numbers:
        places = sorted(each["read"].items(), key=lambda place: -place[1])
        where = ", ".join(f"{place} ({count}×)" for place, count in places[:3])
        yield (f"the script read numbers at {where}{' and elsewhere' * (len(places) > 3)}: each was what lay there, "
               "mostly 0. If it decides by one, --numbers computes it")
    if each["world"]:
        yield (f"rank {each['rank']} of {each['world']}; the others are not there: what a collective returns is as if "
               "each held what this one holds")
    for name, why in each["missing"].items():
        yield f"{name} has no numbers: {why}"
