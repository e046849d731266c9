"""Recordings of PyTorch's own allocator on a GPU, and their replay: each address, each segment.

Each program runs in a process of its own with its settings: `python -m benchmarks.recordings NAME FILE`. Recordings
are kept in data/recordings/<device>/, packed.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from refimpl import phantom
from refimpl.allocator import Settings, Snapshot, compare
from refimpl.model import GPT, GPTConfig

from .record import CHECKOUT, row, slug

FOLDER = CHECKOUT / "data" / "recordings"
MIB = 2**20
LIMIT = 1024 * MIB  # that a program may reserve, where its memory is limited
SHAPE = {"vocab_size": 4096, "context_length": 1024, "layers": 4, "hidden": 512, "heads": 8}


def train(lengths=(1024, 256, 640, 128, 1024, 384)):
    """Train a GPT on sequences of varying length."""
    model = GPT(GPTConfig(**SHAPE), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for length in lengths:
        tokens = torch.zeros(4, length, dtype=torch.int64, device="cuda")
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def streams():
    """Take and free blocks on three streams; other streams use some of them after they are freed."""
    side = [torch.cuda.Stream() for _ in range(2)]
    for i in range(200):
        kept = []
        for stream in (torch.cuda.current_stream(), *side):
            with torch.cuda.stream(stream):
                kept.append(torch.zeros((i * 7919) % (6 * MIB) + 512, dtype=torch.uint8, device="cuda"))
        with torch.cuda.stream(side[i % 2]):
            kept[0].add_(1)
        kept[0].record_stream(side[i % 2])
        if i % 50 == 49:
            torch.cuda.synchronize()


def out_of_memory():
    """Keep a part of each of some large blocks, until a request finds no memory though enough is free."""
    limit(LIMIT)
    kept = []
    for i in range(40):
        try:
            torch.empty((200 + 8 * i) * MIB, dtype=torch.uint8, device="cuda")
            kept.append(torch.empty(120 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            kept = kept[::2]


def emptied():
    """Train, and give back what is free after each of three rounds."""
    for lengths in ((512, 256), (128, 1024), (640,)):
        train(lengths)
        torch.cuda.empty_cache()


def collected():
    """Train with a threshold above which free segments go back."""
    limit(LIMIT)
    train((128, 256, 384, 512, 640, 512, 384))


def pools():
    """Take blocks in a MemPool and outside."""
    pool = torch.cuda.MemPool()
    for i in range(50):
        outside = torch.empty((i * 104_729) % (4 * MIB) + 1, dtype=torch.uint8, device="cuda")
        with torch.cuda.use_mem_pool(pool):
            inside = torch.empty((i * 15_485_863) % (30 * MIB) + 1, dtype=torch.uint8, device="cuda")
        del outside, inside
    return pool  # its segments must be there when the snapshot is taken


def limit(nbytes):
    """Let this process reserve `nbytes`."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info()[1])


PROGRAMS = {  # name → (program, PYTORCH_CUDA_ALLOC_CONF)
    "training": (train, ""),
    "training_expandable": (train, "expandable_segments:True"),
    "training_split": (train, "max_split_size_mb:32,roundup_power2_divisions:8"),
    "streams": (streams, ""),
    "out_of_memory": (out_of_memory, ""),
    "out_of_memory_expandable": (out_of_memory, "expandable_segments:True"),
    "out_of_memory_split": (out_of_memory, "max_split_size_mb:64"),
    "emptied": (emptied, ""),
    "emptied_expandable": (emptied, "expandable_segments:True"),
    "collected": (collected, "garbage_collection_threshold:0.5"),
    "pools": (pools, ""),
}


def record(name, path):
    """Run a program with its recording, and write the snapshot to `path`. In a process that has used no CUDA yet."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    kept = PROGRAMS[name][0]()
    torch.cuda.synchronize()
    raw = Path(path).with_suffix(".raw")
    torch.cuda.memory._dump_snapshot(str(raw))
    Snapshot.load(raw).save(path)
    raw.unlink()
    del kept


def recorded(names, folder):
    """Run programs, each in a new process, all at once: {name: Snapshot}. RuntimeError, with its words, if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    running = {}
    for name in names:
        path = folder / f"{name}.pickle.gz"
        running[name] = path, subprocess.Popen(
            [sys.executable, "-m", "benchmarks.recordings", name, str(path)], stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=PROGRAMS[name][1]))
    found = {}
    for name, (path, process) in running.items():
        _, said = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"{name}: {said.strip()[-2000:]}")
        found[name] = Snapshot.load(path)
    return found


def replayed(name, snapshot, total):
    """Return the Comparison of a program's recording on a device of `total` bytes."""
    limited = PROGRAMS[name][0] in (out_of_memory, collected)
    settings = Settings.parse(PROGRAMS[name][1], version=torch.__version__,
                              memory_fraction=LIMIT / total if limited else None)
    return compare(snapshot, settings, capacity=total)


def folder():
    """Return where recordings of the device at hand are kept; of a device without kernels, for each PyTorch."""
    return FOLDER / (f"phantom-{torch.__version__.partition('+')[0]}" if phantom.running() else
                     slug(torch.cuda.get_device_name()))


def rows_of_recordings():
    """Yield a row for each program: how many of its events the replay has as PyTorch had them."""
    total = torch.cuda.mem_get_info()[1]
    for name, snapshot in recorded(PROGRAMS, folder()).items():
        found = replayed(name, snapshot, total)
        events = sum(entry["action"] == "alloc" or entry["action"].startswith("segment") for entry in snapshot.entries)
        yield row(f"replay of {name}", "as recorded", "events", found.addresses + found.segments, events,
                  difference=found.difference)


if __name__ == "__main__":
    record(*sys.argv[1:])
