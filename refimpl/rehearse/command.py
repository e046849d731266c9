"""`refimpl rehearse SCRIPT --on h100,t4`: what a training script takes on GPUs that are not there."""

import argparse
import json
import sys

from ..allocator.command import size
from ..estimate.command import number
from ..explain.script import check_file
from ..memory.ledger import human
from .run import CannotRehearse, device, rehearse

EXAMPLE = """examples:
  refimpl rehearse train.py --on h100
  refimpl rehearse --on a100-40,h100,t4 --steps 3 train.py --batch 8
  refimpl rehearse --budget 20GiB --snapshot memory.pickle train.py
  refimpl rehearse --world 8 train_fsdp.py"""


def add_arguments(parser):
    """Add the command's arguments to an argparse parser. What follows SCRIPT is the script's own."""
    parser.add_argument("--on", default="h100", metavar="NAMES", help="GPUs of the catalog, with commas; default: h100")
    parser.add_argument("--gpus", type=number, default=1, metavar="N", help="how many the script sees; default 1")
    parser.add_argument("--world", type=number, metavar="N", help="for a script of torchrun's: be one of N ranks; "
                        "the others are not there")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them; default 0")
    parser.add_argument("--budget", type=size, metavar="SIZE", help="as 20GiB: a GPU with this much memory")
    parser.add_argument("--steps", type=number, default=2, metavar="K",
                        help="end after K steps of its optimizers; default: 2, the first of which makes their state")
    parser.add_argument("--numbers", action="store_true",
                        help="compute values on the CPU, slowly: where the script decides by them")
    parser.add_argument("--snapshot", metavar="FILE", help="write PyTorch's recording of the last GPU's memory")
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to stderr")
    parser.add_argument("script", metavar="SCRIPT", help="a training script, run as it is")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")


def run(arguments, parser):
    """Rehearse on each GPU, print what each took, and end with the script's status."""
    try:
        check_file(arguments.script)
        devices = {name: device(name, arguments.gpus, arguments.budget) for name in arguments.on.split(",")}
        if not 0 <= arguments.rank < (arguments.world or 1):
            raise ValueError(f"--rank {arguments.rank} of --world {arguments.world or 1}: expected a rank below it")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    options = {key: getattr(arguments, key) for key in ("world", "rank", "steps", "numbers", "snapshot")}
    try:
        found = {name: rehearse(arguments.script, arguments.arguments, on=each, **options,
                                stdout=sys.stderr if arguments.json else None) for name, each in devices.items()}
    except CannotRehearse as error:
        sys.exit(f"refimpl rehearse: {error}")
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print("\n".join(["", *lines(found, devices, arguments.numbers)]))
    sys.exit(max(each["status"] for each in found.values()))


def lines(found, devices, numbers):
    """Yield what is printed: a table with a line for each GPU, errors, notes, and whose bytes they are."""
    yield f"{'on':<12} {'of':>11} {'allocated':>11} {'reserved':>11} {'fragments':>10}"
    for name, each in found.items():
        peak = {key: max((step[key] for step in each["steps"]), default=0) for key in ("allocated", "reserved")}
        free = 1 - peak["allocated"] / peak["reserved"] if peak["reserved"] else 0.0
        fails = f"  out of memory in step {each['out of memory']['step']}" if each["out of memory"] else ""
        yield (f"{name:<12} {human(devices[name]['memory']):>11} {human(peak['allocated']):>11} "
               f"{human(peak['reserved']):>11} {free:>10.1%}{fails}")
    for name, each in found.items():
        if each["out of memory"]:
            failed = each["out of memory"]
            yield f"\n{name}: {failed['line'] or 'no line of the script'}\n{failed['message']}"
    first = max(found.values(), key=lambda each: each["made"])
    yield "\n" + made(first)
    if unknown := [name for name, each in devices.items() if not each["context"]]:
        yield f"note: what CUDA itself takes of {', '.join(unknown)} was not found, and is counted as nothing"
    yield from (f"note: {note}" for note in notes(first, numbers))
    yield first["words"] if not numbers else first["words"].replace("bytes only, no numbers,", "numbers from the CPU,")


def made(each):
    """Return one sentence that says how far the script came."""
    steps = ", ".join(f"{count} step{'s' * (count > 1)} of {name}" for name, count in each["by class"].items())
    ended = {"steps": "then ended", "end": "then ended by itself", "exit": "then exited", "interrupt": "interrupted",
             "error": f"then failed: {each['said']}"}[each["ending"]]
    if each["out of memory"]:
        ended = "then ran out of memory"
    return f"{steps or 'no optimizer step'}, {ended}"


def notes(each, numbers):
    """Yield what may make the bytes of another run other ones."""
    if not any(step["reserved"] for step in each["steps"]):
        yield "the script took nothing of the device: it may run on the CPU where it does not ask for device=\"cuda\""
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
