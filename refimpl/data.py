"""Real text as tokens, on any machine and with no download: one token is one byte, so the vocabulary is 256.

    text = TextData()                                         # or TextData("my/notes")
    for tokens_BT, targets_BT in text.batches(8, 256):
        loss = model(tokens_BT, targets_BT)

Without a path the text is the reference prose that Python carries for its own `help()` (`pydoc_data.topics`, about
465 kB of English); it differs a little from one Python version to the next, so losses compare only within a version.

Shapes: B batch (sequences of one rank), T sequence length, N bytes.
"""

import fnmatch
import os
from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE = 256
PATTERNS = ("*.txt", "*.md", "*.py", "*.rst")


class TextData:
    """A text, split into the bytes to train on and the last part of it, kept for validation.

    `path` is a UTF-8 file, or a folder: then all files below it whose names match one of `patterns`, in sorted order.
    `validation` is the fraction of the bytes to keep, in [0, 1). `train` and `validation` are 1-D uint8 tensors on the
    CPU. Raises FileNotFoundError, PermissionError, and ValueError for a text that is empty or not UTF-8.

    Batches can be drawn under `FakeTensorMode` too (a dry run): they are fake, of the same shape and dtype.
    """

    def __init__(self, path=None, validation=0.1, *, patterns=PATTERNS):
        if isinstance(patterns, str):
            raise ValueError(f"patterns={patterns!r}: expected several, ({patterns!r},)")
        if not 0 <= validation < 1:
            raise ValueError(f"validation={validation!r}: expected a fraction in [0, 1)")
        if path is None:
            self.name, data = "the text of pydoc_data.topics", _standard_library_text()
        else:
            self.name, data = str(path), _read(Path(path).expanduser(), patterns)
        # The bytearray is there because torch wants memory that it may write to; both tensors share it.
        array_N = np.frombuffer(bytearray(data), dtype=np.uint8)
        train_bytes = len(array_N) - int(len(array_N) * validation)
        self._arrays = {"train": array_N[:train_bytes], "validation": array_N[train_bytes:]}
        self.train = torch.from_numpy(self._arrays["train"])
        self.validation = torch.from_numpy(self._arrays["validation"])

    def __repr__(self):
        sizes = ", ".join(f"{len(array_N)} bytes of {split}" for split, array_N in self._arrays.items())
        return f"TextData({self.name}: {sizes})"

    def batches(
        self, batch_size, sequence_length, *, split="train", seed=0, rank=0, world_size=1, device=None, epochs=1
    ):
        """Iterate over `(tokens_BT, targets_BT)`, int64 on `device`; a target is the token that follows.

        The split is cut into windows of `sequence_length` + 1 bytes that start at multiples of `sequence_length`: each
        byte but the first is a target once. An epoch visits each window once, in an order that `(seed, epoch)` alone
        decides; `epochs=None` goes on for ever. One global batch is `batch_size` · `world_size` windows, and `rank`
        gets its own `batch_size` of them, so that the ranks together draw what one rank would with a batch
        `world_size` times as large. An incomplete last global batch is dropped: all ranks make `steps(…)` steps.

        Arguments are checked when this is called, not at the first batch. Raises ValueError for one that is out of
        range, and for a split that is too short for one sequence or for one global batch.
        """
        steps = self.steps(batch_size, sequence_length, split=split, world_size=world_size)
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank!r}: expected an integer from 0 to {world_size - 1} (world_size={world_size})")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed={seed!r}: expected an integer of at least 0")
        if epochs is not None:
            _check_at_least_one("epochs", epochs, "or None, to go on for ever")

        array_N = self._arrays[split]
        windows = (len(array_N) - 1) // sequence_length

        def generate():
            epoch = 0
            while epochs is None or epoch < epochs:
                order = np.random.default_rng([seed, epoch]).permutation(windows)
                for step in range(steps):
                    first = (step * world_size + rank) * batch_size
                    yield _draw(array_N, order[first : first + batch_size] * sequence_length, sequence_length, device)
                epoch += 1

        return generate()

    def steps(self, batch_size, sequence_length, *, split="train", world_size=1):
        """Return the batches that an epoch gives to each rank: ⌊⌊(N − 1) / T⌋ / (batch_size · world_size)⌋.

        Raises ValueError as `batches` does.
        """
        if split not in self._arrays:
            raise ValueError(f"split={split!r}: expected 'train' or 'validation'")
        _check_at_least_one("batch_size", batch_size)
        _check_at_least_one("sequence_length", sequence_length)
        _check_at_least_one("world_size", world_size)
        length = len(self._arrays[split])
        if length < sequence_length + 1:
            raise ValueError(
                f"the {split} split of {self.name} has {length} bytes, and one sequence of sequence_length="
                f"{sequence_length} needs {sequence_length + 1}: give a longer text, a shorter sequence_length, or "
                f"another validation fraction"
            )
        windows = (length - 1) // sequence_length
        global_batch = batch_size * world_size
        if windows < global_batch:
            raise ValueError(
                f"the {split} split of {self.name} has {windows} windows of {sequence_length} tokens, fewer than one "
                f"global batch of batch_size={batch_size} times world_size={world_size} = {global_batch}: lower "
                f"batch_size or sequence_length, or give a longer text"
            )
        return windows // global_batch


def encode(text):
    """Return the bytes of `text` in UTF-8, as a uint8 tensor (N,)."""
    return torch.from_numpy(np.frombuffer(bytearray(text, "utf-8"), dtype=np.uint8))


def decode(tokens):
    """Return the text of byte tokens (N,), of any integer dtype; what is not valid UTF-8 becomes U+FFFD.

    That happens where a batch cuts a character in two, and in what a model samples. Raises ValueError for a tensor that
    is not 1-D and for a token outside 0…255.
    """
    if tokens.ndim != 1:
        raise ValueError(f"decode takes one sequence of tokens (N,), got shape {tuple(tokens.shape)}: pass it by rows")
    values = tokens.tolist()
    for position, value in enumerate(values):
        if value not in range(VOCAB_SIZE):
            raise ValueError(f"token {value} at position {position} is not a byte: expected 0…{VOCAB_SIZE - 1}")
    return bytes(values).decode("utf-8", errors="replace")


def _draw(array_N, starts_B, sequence_length, device):
    window_BT1 = array_N[starts_B[:, None] + np.arange(sequence_length + 1)]  # (B, T+1)
    # Cut in numpy: under FakeTensorMode torch.tensor makes a fake batch of it, where indexing a real tensor is refused.
    tokens_BT = torch.tensor(window_BT1[:, :-1], dtype=torch.int64, device=device)
    targets_BT = torch.tensor(window_BT1[:, 1:], dtype=torch.int64, device=device)
    return tokens_BT, targets_BT


def _check_at_least_one(name, value, otherwise=""):
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1 {otherwise}".rstrip())


def _standard_library_text():
    from pydoc_data.topics import topics  # half a megabyte that only this needs

    return "".join(topics[topic] for topic in sorted(topics)).encode("utf-8")


def _read(path, patterns):
    """The bytes of a file, or of the matching files below a folder one after the other."""
    if not os.path.isdir(path):
        data = _read_file(path)
        if not data:
            raise ValueError(f"{path} is empty: give a file with text in it, or no path at all")
        return data
    files = []
    for folder, _, names in os.walk(path, onerror=_raise):
        files += [Path(folder) / each for each in names if any(fnmatch.fnmatch(each, p) for p in patterns)]
    data = b"".join(_read_file(file) for file in sorted(files))
    if not data:
        raise ValueError(
            f"no text in {path}: none of the files below it is called {' or '.join(patterns)} and has bytes in it"
        )
    return data


def _read_file(path):
    try:
        data = Path(path).read_bytes()
        data.decode("utf-8")
    except OSError as error:
        _raise(error)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it (iconv -t UTF-8) "
            f"or name another file"
        ) from error
    return data


def _raise(error):
    """Raise what the system refused, with what to do about it. os.walk passes over such a folder unless given this."""
    path = error.filename
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(f"no file or folder {path}: give a UTF-8 text, a folder, or no path at all") from error
    if isinstance(error, PermissionError):
        raise PermissionError(f"cannot read {path}: allow it (chmod u+r) or name another file or folder") from error
    raise error
