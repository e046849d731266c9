"""Runs notebooks from top to bottom without a browser and writes them, executed, into a folder.

usage: python tools/notebooks.py --out build/notebooks notebooks/*.ipynb
"""

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from traitlets import default

SECONDS_PER_CELL = 120
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ThisPython(AsyncKernelManager):
    """Starts the interpreter that runs this file, whatever kernels are installed on the machine."""

    @default("kernel_spec_manager")
    def _without_installed_kernels(self):
        return KernelSpecManager(kernel_dirs=[])

    @default("transport_encryption")
    def _encrypted(self):
        return "auto"  # else the kernel warns that it talks in plain text


def execute(source: Path, target: Path) -> str | None:
    """Executes `source`, writes it to `target` even where a cell fails, and says which cell failed and how."""
    notebook = nbformat.read(source, as_version=4)
    at = 0

    def on_cell_start(cell, cell_index):
        nonlocal at
        at = cell_index

    client = NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", kernel_manager_class=ThisPython, record_timing=False,
        resources={"metadata": {"path": str(source.parent)}}, on_cell_start=on_cell_start,
    )  # fmt: skip
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:  # the cell raised, ran too long, or took the kernel down
        return f"cell {at}: {COLOURS.sub('', str(error))}"
    finally:
        nbformat.write(notebook, target)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder that the executed notebooks go into")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, source in enumerate(args.notebooks, 1):
        print(f"[{i}/{len(args.notebooks)}] {source} ", end="", flush=True)
        start = time.monotonic()
        error = execute(source, args.out / source.name)
        print(f"{'FAILED' if error else 'ok'}, {time.monotonic() - start:.1f} s", flush=True)
        if error:
            failed.append(source.name)
            print(error, flush=True)
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all ran"
    print(f"{len(args.notebooks)} notebooks in {args.out}; {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
