"""Disks that fill up, cut calls short, lose a file or flip a bit, and ranks that are killed while they swap.

Two ranks train, rank 1's disk fails in its second step: an error on the caller that names rank 1 and the fault, in
time; the state saved after the first step is whole, and no temporary file is left. The matrix is what happens times the
store, each at stage 3 and at 1 or 2: 44 launches. With those in one process 110 faults.
"""

import errno
import os
import signal
import time
from unittest.mock import Mock, patch

import pytest
import torch
from patience import in_time, patiently
from saving_kit import differing
from zero_kit import rows_of, square, three_layer_engine
from zero_steps import train

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.offload import DiskStore, TieredStore
from refimpl.offload.disk.flat import Flat
from refimpl.offload.errors import StoreError

SECONDS = 10  # until a fault is named, on a busy machine, too
OPTIONS = {"buffer_bytes": 4096, "buffer_count": 2}
STORES = {"disk": lambda folder: DiskStore(folder, **OPTIONS),
          "tiers": lambda folder, device=1000: TieredStore(folder, device=device, host=4096, **OPTIONS)}


def fails(name, **how):
    return lambda file: setattr(os, name, Mock(**how))


def failing(name, code):
    return fails(name, side_effect=OSError(code, os.strerror(code)))


def killed(name):
    return fails(name, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def cut(file):
    os.truncate(f"/proc/self/fd/{file._fd}", 0)


def flip(file):
    """One bit of each block on the disk."""
    fd = os.open(f"/proc/self/fd/{file._fd}", os.O_RDWR)  # without O_DIRECT
    for offset in range(0, file.nbytes, 4096):
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 16]), offset)
    os.close(fd)


FAULTS = {  # what happens → (how, what is told)
    "full": (failing("pwritev", errno.ENOSPC), "raised .*StoreError: cannot write .* the disk is full"),
    "quota": (failing("pwritev", errno.EDQUOT), "raised .*StoreError: cannot write .* quota is used up"),
    "short write": (fails("pwritev", return_value=0), "raised .*StoreError: cannot write .* only 0 bytes came through"),
    "short read": (fails("preadv", return_value=0), "raised .*StoreError: cannot read .* only 0 bytes came through"),
    "cut": (cut, "raised .*(StoreError: cannot read .* cut the file|DamagedBlock)"),
    "vanished": (failing("preadv", errno.ESTALE), "raised .*StoreError: cannot read .* the file has vanished"),
    "flipped bit": (flip, "raised .*DamagedBlock: .* were not read as they were written"),
    "denied": (failing("pwritev", errno.EACCES), "raised .*StoreError: cannot write .* Permission denied; pass"),
    "device": (failing("preadv", errno.EIO), "raised .*StoreError: cannot read .* the device failed"),
    "killed writing": (killed("pwritev"), "was killed by SIGKILL"),
    "killed reading": (killed("preadv"), "was killed by SIGKILL")}


def faulty(comm, folder, stage, kind, fault):
    store = STORES[kind](folder / "disk")
    engine = three_layer_engine(comm, stage, store=store)
    train(engine, 1).save(folder / "saved")
    comm.barrier()
    if comm.rank == 1:
        store.flush()
        FAULTS[fault][0]((store._space if kind == "disk" else store._mover.space).file)
    train(engine, 3, 1).save(folder / "saved")


@pytest.fixture(scope="module")
def expected():
    return launch(lambda comm: train(three_layer_engine(comm, 0), 1).state_dict(), 2)[0]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("fault", FAULTS)
@patiently
def test_a_fault_is_named_in_time_the_saved_state_is_whole_and_nothing_is_left(fault, kind, expected, tmp_path):
    for stage in (1 + [*FAULTS].index(fault) % 2, 3):
        folder = tmp_path / str(stage)
        (folder / "disk").mkdir(parents=True, exist_ok=True)
        with in_time(SECONDS), pytest.raises(RankError, match=f"(?s)rank 1 {FAULTS[fault][1]}") as caught:
            launch(faulty, 2, folder, stage, kind, fault, timeout=20)
        assert caught.value.rank == 1
        assert list((folder / "disk").iterdir()) == []
        with DiskStore(folder / "disk", **OPTIONS) as store:  # the saved state goes on, at another stage and in another
            engine = three_layer_engine(FakeCommunicator(0, 1), (3, 1, 2)[stage - 1], seed=7, store=store)
            engine.load(folder / "saved")
            assert not differing(engine.state_dict(), expected)
            train(engine, 1, 1)


def strike_at(monkeypatch, name, number, code):
    """The `number`th call of os.`name` fails, and all later ones."""
    real, calls = getattr(os, name), iter(range(10**9))
    def call(*args):
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*args)
    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(("name", "code"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO),
                                            ("posix_fallocate", errno.ENOSPC), ("pwritev", errno.EACCES)])
def test_an_error_of_any_call_is_raised_and_no_thread_or_file_is_left(kind, name, code, monkeypatch, tmp_path):
    struck = 0
    for number in (0, 1, 2, 3, 4, 5, 6, 8):
        room = [1900] * (kind == "tiers")  # one rank has twice the bytes
        with monkeypatch.context() as patched, STORES[kind](tmp_path, *room) as store:
            strike_at(patched, name, number, code)
            try:
                engine = three_layer_engine(FakeCommunicator(0, 1), 1 + number % 3, store=store)
                train(engine, 4)
            except StoreError as error:
                assert error.errno == code and f"{tmp_path}" in str(error)
                struck += 1
        assert list(tmp_path.iterdir()) == []
    assert struck >= 7 if name != "posix_fallocate" else struck >= 2  # a tier needs few places on the disk


@pytest.mark.parametrize("kind", STORES)
def test_a_step_that_found_the_disk_full_can_be_made_again(kind, monkeypatch, tmp_path):
    """Space is reserved before anything leaves memory, so nothing is lost."""
    for stage in (1, 2, 3):
        expected = three_layer_engine(FakeCommunicator(0, 1), stage)
        with (DiskStore(tmp_path, **OPTIONS) if kind == "disk" else
              TieredStore(tmp_path, device=1500 + 300 * (stage == 3), **OPTIONS)) as store:
            engine = three_layer_engine(FakeCommunicator(0, 1), stage, store=store)
            for each in (expected, engine):
                each.backward(square(each, rows_of(each.comm, 0)))
            with monkeypatch.context() as patched:
                strike_at(patched, "posix_fallocate", int(kind == "disk"), errno.ENOSPC)
                with pytest.raises(StoreError, match="the disk is full"):
                    engine.step()
            expected.step()
            engine.step()
            for each in (expected, engine):
                train(each, 1, 1)
            assert not differing(engine.state_dict(), expected.state_dict())


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_put_that_was_interrupted_can_be_made_again(at, tmp_path):
    """Ctrl-C while a bucket is copied: its tensors are whole, and neither buffers nor later calls suffer."""
    tensors, real, copied = [torch.arange(10_000.0)], Flat.copy_out, []
    def interrupted(*args):
        copied.append(args)
        if len(copied) == at:
            raise KeyboardInterrupt
        return real(*args)
    with DiskStore(tmp_path, **OPTIONS) as store:
        for _ in range(3):
            copied.clear()
            with patch.object(Flat, "copy_out", interrupted), pytest.raises(KeyboardInterrupt):
                store.put(0, tensors)
            assert torch.equal(tensors[0], torch.arange(10_000.0))
            store.get(0)
        store.put(0, tensors)
        store.get(0)
        assert torch.equal(tensors[0], torch.arange(10_000.0))


def test_a_write_does_not_overtake_an_earlier_one_of_its_key(monkeypatch, tmp_path):
    real, calls = os.pwritev, iter(range(9))
    def slow_at_first(*args):
        time.sleep(0.3 * (next(calls) == 0))
        return real(*args)
    monkeypatch.setattr(os, "pwritev", slow_at_first)
    with DiskStore(tmp_path, buffer_bytes=4096, buffer_count=4) as store:
        store.put(0, [torch.zeros(1024)])
        store.drop(0)
        store.put(0, new := [torch.ones(1024)])
        store.flush()
        time.sleep(0.4)
        store.get(0)
        assert new[0].sum() == 1024
