"""The GPU's own instructions (SASS) of compiled kernels, as text, by the disassembler that comes with Triton.

nvdisasm takes 0.2 s to start and some milliseconds for a kernel, so the code of many kernels goes into one file, one
behind the other, and the listing is cut into theirs again. Addresses in it count from the beginning of that file.
"""

import collections
import re
import struct
import subprocess
import tempfile

from .compiled import BIN

BYTES = 16  # of an instruction
EXECUTABLE = 4  # the flag of sections with instructions, in an ELF file


def disassembled(compiled):
    """Return each Compiled with its `sass` and its `instructions`."""
    found = list(compiled)
    for capability in {each.capability for each in found}:
        alike = [i for i, each in enumerate(found) if each.capability == capability]
        for i, sass in zip(alike, _listings([_code(found[i].cubin) for i in alike], capability), strict=True):
            found[i] = found[i]._replace(sass=sass, instructions=_opcodes(sass))
    return found


def _listings(codes, capability):
    """Return the instructions of each piece of code for one GPU, one a line."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        architecture = f"SM{capability}{'a' * (capability >= 90)}"  # as Triton has it
        command = [BIN / "nvdisasm", "--binary", architecture, file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in listing.splitlines() if line.lstrip().startswith("/*")]
    if len(lines) * BYTES != sum(map(len, codes)):
        raise RuntimeError(f"nvdisasm lists {len(lines)} instructions in {sum(map(len, codes))} bytes: expected one in "
                           f"{BYTES}")
    lines = iter(lines)
    return ["\n".join(next(lines) for _ in range(len(code) // BYTES)) for code in codes]


def _code(cubin):
    """Return the instructions that are in an ELF file."""
    table, = struct.unpack_from("<Q", cubin, 40)
    entry, count = struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + entry * i) for i in range(count)]
    return b"".join(cubin[begin : begin + size] for _, _, flags, _, begin, size in sections if flags & EXECUTABLE)


def _opcodes(sass):
    """Count the instructions by name, without what follows the first dot (HGMMA.64x128x16.F32 is an HGMMA)."""
    return collections.Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.M))
