"""Real text as tokens, on any machine, without a download. A token is a byte, so the vocabulary has 256 entries.

    text = TextData()                                         # or TextData("my/notes")
    for tokens_BT, targets_BT in text.batches(8, 256):
        loss = model(tokens_BT, targets_BT)

Without a path, the text is the reference manual behind Python's own `help()` (`pydoc_data.topics`, about 465 kB of
English). It differs a little between Python versions, so compare losses only within one version.

Shapes: B batch (sequences of one rank), T sequence length, N bytes.
"""

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB_SIZE = 256
PATTERNS = ("*.txt", "*.md", "*.py", "*.rst")


class TextData:
    """Holds a text, split into bytes for training and a last part for validation.

    `path` is a UTF-8 file or a folder. Of a folder, all files below it whose names match one of `patterns` are read, in
    sorted order. The argument `validation` is the fraction of the bytes for validation, in [0, 1). The attributes
    `train` and `validation` are 1-D uint8 tensors on the CPU. Raises FileNotFoundError, PermissionError, and ValueError
    for a text that is empty or not UTF-8.

    In a dry run (under `FakeTensorMode`) batches are fake tensors of the same shape and dtype.
    """

    def __init__(self, path: Any = None, validation: float = 0.1, *, patterns: Sequence[str] = PATTERNS) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"patterns={patterns!r}: expected a sequence of patterns, ({patterns!r},)")
        if not 0 <= validation < 1:
            raise ValueError(f"validation={validation!r}: expected a fraction in [0, 1)")
        if path is None:
            self.name, data = "the text of pydoc_data.topics", _standard_library_text()
        else:
            self.name, data = str(path), _read(Path(path).expanduser(), patterns)
        # A bytearray, since torch.from_numpy warns about memory that is not writable. Both tensors share it.
        array_N = np.frombuffer(bytearray(data), dtype=np.uint8)
        train_bytes = len(array_N) - int(len(array_N) * validation)
        self._arrays = {"train": array_N[:train_bytes], "validation": array_N[train_bytes:]}
        self.train = torch.from_numpy(self._arrays["train"])
        self.validation = torch.from_numpy(self._arrays["validation"])

    def __repr__(self):
        sizes = ", ".join(f"{len(array_N)} bytes of {split}" for split, array_N in self._arrays.items())
        return f"TextData({self.name}: {sizes})"

    def batches(self, batch_size: int, sequence_length: int, *, split: str = "train", seed: int = 0, rank: int = 0,
                world_size: int = 1, device: torch.device | str | None = None,
                epochs: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over `(tokens_BT, targets_BT)`, int64 on `device`. The target of a token is the next token.

        The split is cut into windows of `sequence_length` + 1 bytes, which start at multiples of `sequence_length`. So
        each byte but the first is a target once. An epoch visits each window once, in an order given by `(seed, epoch)`
        alone; `epochs=None` never ends. A global batch has `batch_size` · `world_size` windows, of which `rank` gets
        `batch_size`. So the ranks together draw what a single rank would with a batch `world_size` times as large. An
        incomplete last global batch is dropped, so that all ranks make `steps(…)` steps.

        Arguments are checked at the call, not at the first batch. Raises ValueError for an argument out of range, and
        for a split that is too short for one sequence or one global batch.
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

    def steps(self, batch_size: int, sequence_length: int, *, split: str = "train", world_size: int = 1) -> int:
        """Return the number of batches per rank in an epoch: ⌊⌊(N − 1) / T⌋ / (batch_size · world_size)⌋.

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


def encode(text: str) -> torch.Tensor:
    """Return the bytes of `text` in UTF-8, as a uint8 tensor (N,)."""
    return torch.from_numpy(np.frombuffer(bytearray(text, "utf-8"), dtype=np.uint8))


def decode(tokens: torch.Tensor) -> str:
    """Return the text of byte tokens (N,), of any integer dtype. Invalid UTF-8 becomes U+FFFD.

    That occurs where a batch cuts a character in two, and in text that a model samples. Raises ValueError for a tensor
    that is not 1-D, and for a token outside 0…255.
    """
    if tokens.ndim != 1:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: expected one sequence (N,); call decode for each row")
    values = tokens.tolist()
    for position, value in enumerate(values):
        if value not in range(VOCAB_SIZE):
            raise ValueError(f"token {value} at position {position} is not a byte: expected 0…{VOCAB_SIZE - 1}")
    return bytes(values).decode("utf-8", errors="replace")


def _draw(array_N, starts_B, sequence_length, device):
    window_BT1 = array_N[starts_B[:, None] + np.arange(sequence_length + 1)]  # (B, T+1)
    # Indexed in numpy: under FakeTensorMode indexing a real tensor fails, and torch.tensor makes a fake batch.
    tokens_BT = torch.tensor(window_BT1[:, :-1], dtype=torch.int64, device=device)
    targets_BT = torch.tensor(window_BT1[:, 1:], dtype=torch.int64, device=device)
    return tokens_BT, targets_BT


def _check_at_least_one(name, value, otherwise=""):
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1 {otherwise}".rstrip())


def _standard_library_text():
    from pydoc_data.topics import topics  # imported here, since it takes half a megabyte

    return "".join(topics[topic] for topic in sorted(topics)).encode("utf-8")


def _read(path, patterns):
    """Return the bytes of a file, or those of all matching files below a folder, concatenated."""
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
            f"no text in {path}: expected a non-empty file below it whose name matches {' or '.join(patterns)}; give "
            f"another folder or other patterns"
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
    """Raise `error` with advice. Without such an `onerror`, os.walk skips folders that it cannot read."""
    path = error.filename
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(f"no file or folder {path}: give a UTF-8 text, a folder, or no path at all") from error
    if isinstance(error, PermissionError):
        raise PermissionError(f"cannot read {path}: allow it (chmod u+r) or name another file or folder") from error
    raise error
