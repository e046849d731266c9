"""What the compiler makes of each attention kernel: shared memory beside what the chip has, and in each row registers,
spills, instructions and ptxas' remarks. Runs on any machine; the readings are Triton's and ptxas', not the device's.
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
MODULES = ("hopper", "gluon_forward")  # of compiler/: kernels that are not in the table; each has a function `cases`
PEER = "shared memory of a program"


def run(device="cpu", named=None):
    """(settings, rows), one row a kernel. `named`: {name: Case} instead of all there are; `device` is not used."""
    ptxas = subprocess.run([BIN / "ptxas", "--version"], check=True, capture_output=True, text=True).stdout
    settings = {"ptxas": re.search(r"V([\d.]+)", ptxas)[1],
                "targets": {chip: f"sm_{number}" for chip, (_, number) in table.TARGETS.items()},
                "variants": table.VARIANTS, "instructions": "how many stand in the code, loops once"}
    named, missing = (named, []) if named else every_case()
    return settings, all_rows(named, missing)


def all_rows(named, missing):
    """Yield the rows that are `missing`, then those of the kernels, as the compiler is done with them."""
    yield from missing
    for name, compiled in tqdm(compile_all(named), "compiling", len(named), delay=BAR_DELAY, leave=False):
        yield kernel_row(name, named[name], compiled)


def every_case():
    """({name: Case}, rows of modules that this Triton cannot import)."""
    named, missing = dict(table.cases()), []
    for module in MODULES:
        try:
            own = importlib.import_module(f".compiler.{module}", __package__).cases()
        except Exception as error:  # of a Triton that lacks what the module is written for: the row says so
            missing.append(failed_row(module, error))
        else:
            named |= {f"{module}, {name}": case for name, case in own.items()}
    return named, missing


def kernel_row(name, case, compiled):
    """The row of one kernel, compiled or not."""
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
    """What a page sorts rows by: of the table's kernels, which one and its tile; of others their module."""
    if not isinstance(name, table.Name):
        return {"kernel": name.partition(",")[0]}
    tile = table.config_of(name)
    return {**name._asdict(), "dtype": str(name.dtype).removeprefix("torch."), "block_m": tile.block_m,
            "block_n": tile.block_n}


def failed_row(name, error):
    """The row of what does not compile, or is not there: the last lines of the error."""
    return row(str(name), PEER, "bytes", None, None, **described(name), error=str(error)[-1000:],
               note=f"did not compile: {str(error).strip().splitlines()[-1][:100]}")
