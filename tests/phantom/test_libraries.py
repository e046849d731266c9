"""What is built for a torch: its imports are read, each has an answer, and what is loaded is what was built."""

import os
import pwd
import subprocess
import sys

import pytest

from refimpl.phantom import libraries

C = r"""
int cudaMalloc(void **, unsigned long);
int cublasSgemm_v2(void), cudnnRNNForward(void), ncclGroupStart(void);
int used(void) { void *p; return cudaMalloc(&p, 100) + cublasSgemm_v2() + cudnnRNNForward() + ncclGroupStart(); }
const char names[] = "\0nvmlInit_v2\0nvmlDeviceGetName\0";
"""


def fake_torch(folder, soname="libcudart.so.13"):
    """A package with a library that imports from CUDA as torch's do, and of which that is all."""
    (folder / "lib").mkdir(parents=True)
    (folder / "use.c").write_text(C)
    stub, cc = folder / "stub.so", ["cc", "-shared", "-fPIC"]
    subprocess.run([*cc, "-nostdlib", f"-Wl,-soname,{soname}", "-x", "c", os.devnull, "-o", stub], check=True)
    subprocess.run([*cc, folder / "use.c", "-o", folder / "lib" / "libc10_cuda.so", "-Wl,--no-as-needed",
                    "-Wl,--unresolved-symbols=ignore-all", stub], check=True)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "refimpl"


def test_imports_are_read_and_each_has_an_answer(tmp_path, cache):
    torch = fake_torch(tmp_path / "torch")
    functions, needed = libraries.imports(torch / "lib")
    assert functions == {"cudaMalloc", "cublasSgemm_v2", "cudnnRNNForward", "ncclGroupStart", "nvmlInit_v2",
                         "nvmlDeviceGetName"}
    assert needed == {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"}
    folder = libraries.build(torch, "2.99.0")
    assert {path.name for path in folder.iterdir()} == needed | {"libphantom.so", "files"}
    program = f"""
import ctypes
for name in ("libphantom.so", "libcudart.so.13"):
    ctypes.CDLL({str(folder)!r} + "/" + name, ctypes.RTLD_GLOBAL)
assert ctypes.CDLL({str(torch / "lib" / "libc10_cuda.so")!r}).used() == 3000, "cuDNN's alone is an error"
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"REFIMPL_PHANTOM_MEMORY": "1000000"})


def test_it_is_built_once_and_anew_for_another_torch(tmp_path, cache):
    torch = fake_torch(tmp_path / "torch")
    first = libraries.build(torch, "2.99.0")
    made = os.stat(first / "libphantom.so").st_mtime_ns
    assert libraries.build(torch, "2.99.0") == first and os.stat(first / "libphantom.so").st_mtime_ns == made
    assert libraries.build(torch, "2.99.1") != first and len(list(cache.iterdir())) == 2, "nothing is left beside them"


def test_what_is_not_as_it_was_built_is_not_loaded(tmp_path, cache, monkeypatch):
    torch = fake_torch(tmp_path / "torch")
    folder = libraries.build(torch, "2.99.0")
    with (folder / "libcudart.so.13").open("ab") as file:
        file.write(b"more")
    with pytest.raises(libraries.CannotBuild, match=f"libcudart.so.13 is not as it was built: delete {folder}"):
        libraries.build(torch, "2.99.0")
    folder.chmod(0o777)
    with pytest.raises(libraries.CannotBuild, match=f"others than you can write to {folder}: delete it"):
        libraries.build(torch, "2.99.0")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(libraries.CannotBuild, match="belongs to another user: set XDG_CACHE_HOME"):
        libraries.build(torch, "2.99.0")


def test_a_relative_cache_is_not_used_and_without_a_home_directory_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = libraries.build(fake_torch(tmp_path / "torch"), "2.99.0")
    assert folder.parent == tmp_path / "home" / ".cache" / "refimpl" and not (tmp_path / "relative").exists()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    with pytest.raises(libraries.CannotBuild, match="there is no home directory .*: set XDG_CACHE_HOME"):
        libraries.build(tmp_path / "torch", "2.99.0")


@pytest.mark.parametrize(("environment", "soname", "words"), [
    ({"PATH": "/nowhere"}, "libcudart.so.13", "no C compiler is on PATH: install gcc"),
    ({"CC": "/bin/false"}, "libcudart.so.13", "/bin/false -c fails"),
    ({}, "libcudart.so.12", "is linked against libcuda.so.1, libcudart.so.12, .* and no libcudart.so.13"),
    ({"XDG_CACHE_HOME": "/dev/null"}, "libcudart.so.13", "cannot be written or read .*: set XDG_CACHE_HOME")])
def test_what_cannot_be_built_says_why_in_one_sentence(tmp_path, cache, monkeypatch, environment, soname, words):
    torch = fake_torch(tmp_path / "torch", soname)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(libraries.CannotBuild, match=words) as caught:
        libraries.build(torch, "2.99.0")
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir()), "something half built is left"


def test_what_is_kept_has_a_hash_of_each_file(tmp_path):
    made, folder = tmp_path / "made", tmp_path / "kept"
    made.mkdir()
    (made / "libphantom.so").write_bytes(b"as it was built")
    libraries._keep(made, folder)
    libraries._check(folder)
    (folder / "libphantom.so").write_bytes(b"something else")
    with pytest.raises(libraries.CannotBuild, match="libphantom.so is not as it was built"):
        libraries._check(folder)
