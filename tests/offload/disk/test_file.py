"""A file without a name: aligned blocks, short calls, what is refused, and that nothing is left of it."""

import errno
import mmap
import os
import subprocess
import sys
import textwrap

import pytest

from refimpl.offload.disk import file as module
from refimpl.offload.disk.file import BLOCK, BlockFile, aligned
from refimpl.offload.errors import StoreError


@pytest.fixture
def store_file(tmp_path):
    found = BlockFile(tmp_path)
    yield found
    found.close()


def memory(nbytes):
    return memoryview(mmap.mmap(-1, nbytes))


def test_aligned():
    assert [aligned(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]


def test_blocks_come_back_and_the_folder_stays_empty(store_file, tmp_path):
    store_file.reserve(4 * BLOCK)
    out, back = memory(2 * BLOCK), memory(2 * BLOCK)
    out[:] = os.urandom(2 * BLOCK)
    store_file.write(out, BLOCK)
    store_file.read(back, BLOCK)
    assert bytes(out) == bytes(back) and list(tmp_path.iterdir()) == []
    assert store_file.nbytes == 4 * BLOCK


def test_a_file_system_without_unnamed_files_or_without_o_direct(monkeypatch, tmp_path):
    opened, real = [], os.open

    def refusing(path, flags, *mode, **more):
        if flags & getattr(os, "O_TMPFILE", 0) == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        if flags & module.DIRECT:
            raise OSError(errno.EINVAL, "not here")
        opened.append(path)
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refusing)
    found = BlockFile(tmp_path)
    assert not found.direct and opened and list(tmp_path.iterdir()) == []
    found.reserve(BLOCK)
    out, back = memory(BLOCK), memory(BLOCK)
    out[:] = os.urandom(BLOCK)
    found.write(out, 0)
    found.read(back, 0)
    found.close()
    assert bytes(out) == bytes(back)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_short_call_is_followed_by_another(store_file, monkeypatch, verb):
    """Also one that stops at no block's edge, after which O_DIRECT would refuse the rest."""
    store_file.reserve(4 * BLOCK)
    out, back = memory(4 * BLOCK), memory(4 * BLOCK)
    out[:] = os.urandom(4 * BLOCK)
    name = f"p{verb}v"
    real, counts = getattr(os, name), iter([BLOCK, 1000])

    def short(fd, buffers, offset):
        return real(fd, [buffers[0][: next(counts, len(buffers[0]))]], offset)

    monkeypatch.setattr(os, name, short)
    store_file.write(out, 0)
    store_file.read(back, 0)
    assert bytes(out) == bytes(back)


def test_a_call_that_transfers_nothing_is_an_error(store_file):
    store_file.reserve(BLOCK)
    with pytest.raises(StoreError, match="cannot read 8,192 bytes at 0 .* only 4,096 bytes came through"):
        store_file.read(memory(2 * BLOCK), 0)


def test_a_full_disk_is_said_when_space_is_reserved(store_file, monkeypatch):
    store_file.reserve(BLOCK)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="cannot reserve 8,192 bytes more than 4,096 .* the disk is full: free") as e:
        store_file.reserve(3 * BLOCK)
    assert e.value.errno == errno.ENOSPC and store_file.nbytes == BLOCK


def test_folders_that_cannot_hold_a_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no such folder; make it"):
        BlockFile(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="needs a folder"):
        BlockFile(tmp_path / "file")

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # a test may run as root, whom no folder refuses
    with pytest.raises(PermissionError, match="not writable; pass one that is"):
        BlockFile(tmp_path)


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without names")
def test_space_comes_back_when_a_process_is_killed(tmp_path):
    program = textwrap.dedent(f"""
        import os, signal
        from refimpl.offload.disk.file import BlockFile
        file = BlockFile({str(tmp_path)!r})
        file.reserve(1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert ended.returncode == -9 and list(tmp_path.iterdir()) == []
