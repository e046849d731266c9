"""What the compiler makes of each kernel of attention and of the head: its shared memory beside the chip's, and in each
row registers, spills, instructions and ptxas' remarks. The readings come from Triton and ptxas, so no GPU is needed.
"""

import importlib
import re
import subprocess

from tqdm import tqdm

from .compiler import table
from .compiler.compiled import BIN
from .compiler.processes import compile_all
from .record import row
from .runner import BAR_DELAY

SHOWN = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS")
# In compiler/: kernels that are not in the table; each has a function `cases`.
MODULES = ("scores", "block_sparse", "delta_rule", "hopper", "gluon_forward", "cross_entropy", "quantized", "small")
PEER = "shared memory of a program"


def run(device="cpu", named=None):
    """Compile the kernels: (settings, rows), one row each. `named`: {name: Case} instead of all kernels.

    `device` is not used.
    """
    ptxas = subprocess.run([BIN / "ptxas", "--version"], check=True, capture_output=True, text=True).stdout
    settings = {"ptxas": re.search(r"V([\d.]+)", ptxas)[1],
                "targets": {chip: f"sm_{number}" for chip, (_, number) in table.TARGETS.items()},
                "variants": table.VARIANTS, "instructions": "how many stand in the code, loops once"}
    named, missing = (named, []) if named else every_case()
    return settings, all_rows(named, missing)


def all_rows(named, missing):
    """Yield the rows in `missing`, then the row of each kernel as soon as it is compiled."""
    yield from missing
    for name, compiled in tqdm(compile_all(named), "compiling", len(named), delay=BAR_DELAY, leave=False):
        yield kernel_row(name, named[name], compiled)


def every_case():
    """Return ({name: Case}, rows of the modules that cannot be imported with this Triton)."""
    named, missing = dict(table.cases()), []
    for module in MODULES:
        try:
            own = importlib.import_module(f".compiler.{module}", __package__).cases()
        except Exception as error:  # this Triton lacks something that the module needs; the row says what
            missing.append(failed_row(module, error))
        else:
            named |= {f"{module}, {name}": case for name, case in own.items()}
    return named, missing


def kernel_row(name, case, compiled):
    """Return the row of one kernel, or of the error if it did not compile."""
    if isinstance(compiled, Exception):
        return failed_row(name, compiled)
    shown = {which: compiled.instructions[which] for which in SHOWN}
    remarks = [re.sub(r"\s+", " ", line) for line in compiled.warnings]
    codes = sorted(set(re.findall(r"\((C\d+)\)", "".join(remarks))))
    note = [f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled",
            *(f"{count} {which}" for which, count in shown.items() if count), *codes]
    return row(str(name), PEER, "bytes", compiled.shared_bytes, compiled.shared_limit, **described(name),
               registers=compiled.registers, spill_bytes=compiled.spill_bytes, stack_bytes=compiled.stack_bytes,
               warps=compiled.warps, num_warps=case.num_warps, num_stages=case.num_stages, instructions=shown,
               remarks=remarks, faults=len(compiled.faults()), seconds=round(compiled.seconds, 3),
               note=", ".join(note))


def described(name):
    """Return what pages select rows by: a table kernel's name and tile, another kernel's module."""
    if not isinstance(name, table.Name):
        return {"kernel": name.partition(",")[0]}
    tile = table.config_of(name)
    return {**name._asdict(), "dtype": str(name.dtype).removeprefix("torch."), "block_m": tile.block_m,
            "block_n": tile.block_n}


def failed_row(name, error):
    """Return the row of a kernel that does not compile or a module that cannot be imported: the error's last lines."""
    return row(str(name), PEER, "bytes", None, None, **described(name), error=str(error)[-1000:],
               note=f"did not compile: {str(error).strip().splitlines()[-1][:100]}")
