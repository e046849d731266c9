"""Writes files that survive a crash: hashed while they are written, then synced; and one that is replaced atomically.

A safetensors file:

    | n: 8 bytes | n bytes of JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes, one after the other |

Its header needs only dtypes and shapes, so tensors are written one at a time, and no copy of all is made. (The
safetensors library reads such files by slices, but to write one it needs all tensors at once.)

Bytes that are written are in the kernel's memory. `fsync` of the file brings them to the disk, `fsync` of its folder
brings its name there. `os.replace` is atomic: a reader, or a crash, finds either the old file or the new one. See
fsync(2) and rename(2).
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


def widest_first(items, dtype_of):
    """Return `items` in an order in which each tensor begins at a multiple of its element's bytes."""
    return sorted(items, key=lambda item: -dtype_of(item).itemsize)


def header_of(specs, metadata=None):
    """Return the first bytes of a safetensors file of the tensors `specs`: [(name, dtype, shape)], in that order.

    TypeError for a dtype that the format does not have.
    """
    entries, end = ({"__metadata__": metadata} if metadata else {}), 0
    for name, dtype, shape in specs:
        if dtype not in NAMES:
            raise TypeError(f"{name} is of {dtype}: safetensors has {', '.join(NAMES.values())}")
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def safetensors_bytes(specs, metadata=None):
    """Return the bytes of the file that `write_tensors` makes of `specs`."""
    return len(header_of(specs, metadata)) + sum(torch.Size(shape).numel() * dtype.itemsize
                                                 for _, dtype, shape in specs)


def write_tensors(path, specs, tensors, metadata=None):
    """Write and sync a safetensors file; return {"bytes", "sha256"} of it. `tensors`: an iterable in the order of
    `specs`; each tensor is written before the next is asked for."""
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "wb") as file:
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
        yield raw_bytes(tensor)


def raw_bytes(tensor):
    """Return a tensor's bytes, in host memory, as an array. (After `tensor.numpy()` no store could empty its storage by
    `resize_(0)`; after this one can.)"""
    return np.from_dlpack(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))


def make_folder(path):
    """Make the folder `path` and those above it, and sync the name of each."""
    path = Path(path).absolute()
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path):
    """Sync the names in a folder."""
    folder = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def naming(path):
    """Name the file in an OSError that does not, as one of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None and str(path) not in str(error):  # that of another library
            raise type(error)(f"{path}: {error}") from None
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing(path):
    """Give the name of a new, empty file to write and sync. It is put in the place of `path`, atomically, when the
    context ends; after an error it is removed."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    # with the mode of an ordinary file, which one of tempfile's would not have
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    sync_folder(Path(path).absolute().parent)  # else the new name may be lost in a crash


def write_atomically(path, text):
    """Write `text` to the file `path`. After a crash it has this text, or what it had before."""
    with replacing(path) as temporary, naming(temporary), open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path):
    """Return the SHA-256 of a file, as `sha256sum` prints it."""
    with naming(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
