"""Files as safetensors reads them, and what is left of a save when the power goes at each of its moments."""

import os
import shutil

import pytest
import torch
from refused_kit import full_disk
from safetensors.torch import load_file, save_file
from saving_kit import alone, few

from refimpl.saving import SavedStateError, durable, manifest, sharded
from refimpl.saving.durable import safetensors_bytes, sha256_of, widest_first, write_atomically, write_tensors

TENSORS = {"a": torch.arange(7, dtype=torch.float32).view(7, 1), "b/c": torch.randn(3, 5).bfloat16(),
           "none": torch.zeros(0, 4), "one": torch.tensor(3, dtype=torch.int64), "bits": torch.tensor([True, False]),
           "ü": torch.randn(2, 3).half().t()}


def test_files_are_those_of_the_library(tmp_path):
    named = widest_first(TENSORS.items(), lambda item: item[1].dtype)
    specs = [(name, x.dtype, x.shape) for name, x in named]
    about = write_tensors(tmp_path / "ours", specs, (x for _, x in named), {"format": "pt"})
    found = load_file(tmp_path / "ours")
    assert list(found) and found.keys() == TENSORS.keys()
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in TENSORS.items())
    assert about == {"bytes": os.path.getsize(tmp_path / "ours"), "sha256": sha256_of(tmp_path / "ours")}
    assert about["bytes"] == safetensors_bytes(specs, {"format": "pt"})
    save_file({name: x.contiguous() for name, x in TENSORS.items()}, tmp_path / "theirs", {"format": "pt"})
    assert abs(about["bytes"] - os.path.getsize(tmp_path / "theirs")) <= 40  # the order of names, in the header


def test_a_storage_can_be_emptied_after_it_was_written(tmp_path):
    x = torch.arange(5.0)
    write_tensors(tmp_path / "x", [("x", x.dtype, x.shape)], [x])
    x.untyped_storage().resize_(0)
    mutant = torch.arange(5.0)
    mutant.numpy()
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        mutant.untyped_storage().resize_(0)


def test_what_a_file_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match=r"x is of torch.complex128: safetensors has F64, "):
        safetensors_bytes([("x", torch.complex128, (1,))])
    with pytest.raises(ValueError, match=r"x has shape \(2,\), torch.float32: expected \(3,\)"):
        write_tensors(tmp_path / "x", [("x", torch.float32, (3,))], [torch.zeros(2)])


def test_each_tensor_is_asked_for_when_the_one_before_is_written(tmp_path):
    seen = []
    def tensors():
        for i in range(3):
            yield torch.full((100_000,), float(i))
            seen.append(os.path.getsize(tmp_path / "x"))
    write_tensors(tmp_path / "x", [(str(i), torch.float32, (100_000,)) for i in range(3)], tensors())
    assert seen[0] < 500_000 and seen[1] < 900_000


def test_a_file_changes_atomically(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    durable.make_folder(path.parent)
    for text in ("old", "new"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert os.listdir(path.parent) == ["file"]


def test_a_new_file_has_the_mode_of_an_ordinary_one(tmp_path):
    write_atomically(tmp_path / "ours", "text")
    (tmp_path / "theirs").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_what_cannot_be_written_leaves_what_was_and_nothing_beside(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with full_disk(), pytest.raises(OSError, match=r"No space left on device: .*file\.\w{8}\.tmp"):
        write_atomically(path, "new")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "old"


# --- power cuts ------------------------------------------------------------------------------------------------------


class Disk:
    """What a crash may leave of a folder. A file's bytes are sure after its fsync, names after that of their folder;
    what is not sure may be there or not: names as they were or as they are, files that are not synced empty."""

    def __init__(self, root):
        self.root, self.contents, self.names = root, {}, {}
        for path in (root, *root.rglob("*")):
            self.sync(path)

    def sync(self, path):
        if path.is_dir():
            self.names[path] = self.present(path)
        else:
            self.contents[path.stat().st_ino] = path.read_bytes()

    def sync_open(self, fd):
        for path in (self.root, *self.root.rglob("*")):
            if os.path.samestat(path.stat(), os.fstat(fd)):
                self.sync(path)

    @staticmethod
    def present(path):
        """{name: (inode, bytes)} of what is in a folder, bytes None of a folder."""
        return {each.name: (each.stat().st_ino, None if each.is_dir() else each.read_bytes())
                for each in (path.iterdir() if path.is_dir() else ())}

    def leave(self, target, names, path=None):
        """Write what is left to `target`; `names` is "synced" or "present"."""
        path = path or self.root
        target.mkdir()
        present = self.present(path)
        for name, (inode, data) in (present if names == "present" else self.names.get(path, {})).items():
            if data is None:
                self.leave(target / name, names, path / name)
            else:
                now = next((there for number, there in present.values() if number == inode), data)
                sure = self.contents.get(inode, b"")
                (target / name).write_bytes(sure if now == sure else b"")


def test_what_a_save_is_sure_of_is_whole(tmp_path, monkeypatch):
    """The power goes after a first save: what no fsync has made sure is lost."""
    root, real_fsync = tmp_path / "root", os.fsync
    root.mkdir()
    disk = Disk(root)

    def fsync(fd):
        disk.sync_open(fd)
        real_fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        alone(build=few).train(2).save(root)
    disk.leave(tmp_path / "left", "synced")
    assert alone(seed=7, build=few).load(tmp_path / "left").step == 2


def crashes(tmp_path, monkeypatch):
    """The step that a load finds after a crash at each moment of a save of step 2 over one of step 1; None: nothing."""
    root = tmp_path / "root"
    alone().train(1).save(root)
    disk, found, real_fsync, real_replace = Disk(root), [], os.fsync, os.replace

    def crash():
        for names in ("synced", "present"):
            disk.leave(tmp_path / "left", names)
            try:
                found.append(alone(seed=7).train(5).load(tmp_path / "left").step)
            except SavedStateError:
                found.append(None)
            shutil.rmtree(tmp_path / "left")

    def fsync(fd):
        crash()
        disk.sync_open(fd)
        real_fsync(fd)

    def replace(source, target):
        crash()
        real_replace(source, target)
        crash()

    holder = alone().train(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", replace)
        holder.save(root)
    crash()
    return found


def test_power_may_go_at_any_moment(tmp_path, monkeypatch):
    found = crashes(tmp_path, monkeypatch)
    assert set(found) == {1, 2} and len(found) > 12 and found[0] == 1
    assert found[-2:] == [2, 2]  # after the save it is the new one, for sure


def unsynced_files(patch):
    real = durable.write_tensors
    def write(*args):
        sync, os.fsync = os.fsync, lambda fd: None
        try:
            return real(*args)
        finally:
            os.fsync = sync
    patch.setattr(sharded, "write_tensors", write)


def unsynced_names(patch):
    patch.setattr(sharded, "sync_folder", lambda path: None)


def in_place(patch):
    def write(path, text):
        with open(path, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    patch.setattr(manifest, "write_atomically", write)


def removed_too_early(patch):
    real = manifest.begin
    def begin(directory, step):
        if directory.is_dir():
            manifest.remove_others(directory, None)
        return real(directory, step)
    patch.setattr(manifest, "begin", begin)


def manifest_first(patch):
    real = sharded._write
    def write(state, folder):
        answer = real(state, folder)
        held = {path: path.read_bytes() for path in folder.iterdir()}
        for path in held:
            path.unlink()
        description, (report,) = sharded.describe(state, saving=True)
        sharded._commit(folder.parent, folder.name, description, {
            "rank-00000.safetensors": {**answer[0], "pieces": report["pieces"]}})
        for path, data in held.items():
            path.write_bytes(data)
        return real(state, folder)
    patch.setattr(sharded, "_write", write)


@pytest.mark.parametrize("mutant", [unsynced_files, unsynced_names, in_place, removed_too_early, manifest_first])
def test_saves_in_another_order_lose_the_saved_state(tmp_path, monkeypatch, mutant):
    with monkeypatch.context() as patch:
        mutant(patch)
        assert None in crashes(tmp_path, monkeypatch)
