"""Files that outlast a crash: written from end to end, hashed on the way, synced; and one that changes all at once.

A safetensors file:

    | n: 8 bytes | n bytes of JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes, one after the other |

Its bytes are known before the first is written, so tensors go to it one at a time, and no copy of all is made. The
library reads such files by slices; to write one it wants all tensors at hand.

What is written is in the kernel's memory. `fsync` of the file brings its bytes to the disk, `fsync` of its folder its
name. `os.replace` puts one file in another's place at a single moment: a reader, and a crash, find either the old or
the new one. See fsync(2) and rename(2).
"""

import hashlib
import json
import os
from pathlib import Path

import torch

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


def widest_first(items, dtype_of):
    """`items` in an order in which each tensor begins at a multiple of its element's bytes."""
    return sorted(items, key=lambda item: -dtype_of(item).itemsize)


def header_of(specs, metadata=None):
    """The first bytes of a safetensors file of tensors [(name, dtype, shape)], in that order.

    TypeError for a dtype that the format does not have.
    """
    entries, end = ({"__metadata__": metadata} if metadata else {}), 0
    for name, dtype, shape in specs:
        if dtype not in NAMES:
            raise TypeError(f"{name} is of {dtype}: safetensors has {', '.join(NAMES.values())}")
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_bytes(specs, metadata=None):
    """Bytes of that file."""
    return len(header_of(specs, metadata)) + sum(torch.Size(shape).numel() * dtype.itemsize
                                                 for _, dtype, shape in specs)


def write_tensors(path, specs, tensors, metadata=None):
    """A safetensors file, synced: {"bytes", "sha256"} of it. `tensors`: an iterable, in the order of `specs`; each is
    written before the next is asked for."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in _parts(specs, tensors, metadata):
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _parts(specs, tensors, metadata):
    yield header_of(specs, metadata)
    for (name, dtype, shape), tensor in zip(specs, tensors, strict=True):
        if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}: expected {shape}, {dtype}")
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def make_folder(path):
    """`path`, and the folders above it, each with its name on the disk."""
    path = Path(path).absolute()
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path):
    """Bring the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace(temporary, path):
    """A file that is synced comes to its place, at once and to stay."""
    os.replace(temporary, path)
    sync_folder(Path(path).absolute().parent)


def write_at_once(path, text):
    """The file at `path` has this text, or what it had before."""
    temporary = f"{path}.tmp"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    replace(temporary, path)


def sha256_of(path):
    """Of a file, as `sha256sum` prints it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
