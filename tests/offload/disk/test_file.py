"""A file without a name: aligned blocks, short calls, what is refused, and that nothing is left of it."""

import errno
import mmap
import os
import subprocess
import sys
import textwrap
from unittest.mock import patch

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


def come_back(file, nbytes, at=0):
    """Whether bytes that are written here are read here."""
    out, back = memory(nbytes), memory(nbytes)
    out[:] = os.urandom(nbytes)
    file.write(out, at)
    file.read(back, at)
    return bytes(out) == bytes(back)


def test_aligned():
    assert [aligned(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]


def test_blocks_come_back_and_the_folder_stays_empty(store_file, tmp_path):
    store_file.reserve(4 * BLOCK)
    assert come_back(store_file, 2 * BLOCK, BLOCK) and list(tmp_path.iterdir()) == []
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
    assert come_back(found, BLOCK)
    found.close()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_short_call_is_followed_by_another(store_file, monkeypatch, verb):
    """Also one that stops at no block's edge, after which O_DIRECT would refuse the rest."""
    store_file.reserve(4 * BLOCK)
    name, counts = f"p{verb}v", iter([BLOCK, 1000])
    real = getattr(os, name)
    def short(fd, buffers, offset):
        return real(fd, [buffers[0][: next(counts, len(buffers[0]))]], offset)
    monkeypatch.setattr(os, name, short)
    assert come_back(store_file, 4 * BLOCK)


def test_a_call_that_transfers_nothing_is_an_error(store_file):
    store_file.reserve(BLOCK)
    with pytest.raises(StoreError, match="cannot read 8,192 bytes at 0 .* only 4,096 bytes came through"):
        store_file.read(memory(2 * BLOCK), 0)


def test_a_full_disk_is_said_when_space_is_reserved(store_file):
    store_file.reserve(BLOCK)
    full = OSError(errno.ENOSPC, "No space left on device")
    told = "cannot reserve 8,192 bytes more than 4,096 .* the disk is full: free"
    with patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(StoreError, match=told) as e:
        store_file.reserve(3 * BLOCK)
    assert e.value.errno == errno.ENOSPC and store_file.nbytes == BLOCK


def test_folders_that_cannot_hold_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder; make it"):
        BlockFile(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="needs a folder"):
        BlockFile(tmp_path / "file")
    refused, told = PermissionError(errno.EACCES, "Permission denied"), "not writable; pass one that is"
    # a test may run as root, whom no folder refuses
    with patch.object(os, "open", side_effect=refused), pytest.raises(PermissionError, match=told):
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
