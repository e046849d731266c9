"""The command `python -m benchmarks NAME [--record] [--out DIR]`."""

import argparse
import importlib
import sys
import traceback
from pathlib import Path

import torch

from refimpl.untrusted.text import print_text

from . import NAMES, record


def main(arguments=None):
    """Run the benches that the command line names, print their rows, and write them with `--record`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a technique beside its peer.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    run(parser.parse_args(arguments), parser)


def add_arguments(parser):
    """Add the command's arguments to `parser`, and to its help a line for each bench."""
    parser.add_argument("name", choices=[*NAMES, "all"], metavar="NAME", help=f"one of {', '.join(NAMES)}, or all")
    parser.add_argument("--record", action="store_true", help="write data/measurements/<device>/NAME.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="with --record: write below DIR instead")
    lines = {**NAMES, "all": "all of them, one after the other"}
    parser.epilog = "\n".join(["NAME:", *(f"  {name:<14} {line}" for name, line in lines.items())])


def run(chosen, parser):
    """Run what the command line chose. If a bench raises, the others still run, and the exit status is 1."""
    if chosen.out and not chosen.record:
        parser.error("--out says where --record writes: give both")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names, failed = NAMES if chosen.name == "all" else [chosen.name], []
    for name in names:
        try:
            run_one(name, device, chosen.record, chosen.out)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"{', '.join(failed)}: ended by the error above; rows read before it are in NAME.partial.json"
                 if chosen.record else f"{', '.join(failed)}: ended by the error above")


def run_one(name, device, to_record, folder):
    """Run one bench and print its rows. With `to_record`, write each row as soon as it is measured."""
    settings, rows = importlib.import_module(f".{name}", __package__).run(device)
    reading = record.describe(name, settings, [], where_it_ran(settings, device))
    print_text(f"{name} on {reading['device']['name']}, torch {reading['versions']['torch']}", flush=True)
    try:
        for each in rows:
            reading["rows"].append(each)
            if to_record:
                record.write(reading, folder, partial=True)
    finally:
        print_text(table(reading["rows"]), flush=True)
    if to_record:
        print_text(f"written to {record.write(reading, folder)}", flush=True)


def where_it_ran(settings, device):
    """The device that a record is filed under: `device`, or the CPU where a bench put its ranks' tensors there."""
    places = settings.get("tensors on", settings.get("tokens on", device))  # comm has a place for each number of ranks
    return "cpu" if set(places.values() if isinstance(places, dict) else [places]) == {"cpu"} else device


def table(rows):
    """Return the rows as aligned text: what, its value, the peer, its value, the ratio, and a note if there is one."""
    lines = [("", "", "beside", "", "ratio", "")]
    for each in rows:
        value, peer_value = (_number(each[key], each["unit"]) for key in ("value", "peer_value"))
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.4f}"
        lines.append((each["what"], value, each["peer"], peer_value, ratio, each.get("note", "")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<><>><", widths, strict=True))
    return "\n".join(template.format(*line).rstrip() for line in lines)


def _number(value, unit):
    if value is None:
        return "-"
    return (f"{value:,}" if isinstance(value, int) else f"{value:.4g}") + f" {unit}"


if __name__ == "__main__":
    main()
