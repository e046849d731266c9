"""Files are opened if they are regular and small enough: a pipe, a device, a folder and a large file are not."""

import os

import pytest

from refimpl.untrusted.files import opened, text_of


def test_a_file_within_the_limit(tmp_path):
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_text("é")
    link.symlink_to(path)
    with opened(path, 2) as file:
        assert file.read() == "é".encode()
    assert text_of(link, 2) == "é" and file.closed
    with pytest.raises(ValueError, match=r"a has 2 bytes: expected at most 1"):
        text_of(path, 1)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        text_of(path, 2)


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="is a pipe or a device: expected a file"), opened(path, 9):
            pass
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), opened(tmp_path, 9):
        pass
    with pytest.raises(FileNotFoundError), opened(tmp_path / "none", 9):
        pass
