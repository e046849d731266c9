"""What is loaded was compiled by this user, is whole, and nobody else can have written it; else torch is taken."""

import functools
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.common import compiling
from refimpl.common.compiling import CannotCompile
from refimpl.offload import CPUAdam
from refimpl.offload import adamw_kernels as kernels

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def cache(monkeypatch, tmp_path):
    (tmp_path / "small.cpp").write_text(SOURCE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_library", functools.cache(kernels._library.__wrapped__))
    monkeypatch.setattr(compiling, "compiled", functools.partial(compiling.compiled, tmp_path / "small.cpp"))
    return tmp_path / "refimpl"


@pytest.fixture
def another_users(tmp_path):
    """A folder that belongs to another user."""
    if os.getuid():
        return Path("/usr")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    return tmp_path / "theirs"


def test_a_relative_cache_and_another_user_s_are_not_used(cache, another_users, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for said in ("relative", "", str(another_users)):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert compiling.cache_directory() == tmp_path / "home" / ".cache" / "refimpl"
    for said in (tmp_path, tmp_path / "not" / "there" / "yet"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(said))
        assert compiling.cache_directory() == said / "refimpl"


def cpu_adam_says(reason):
    """CPUAdam takes torch's kernel, and says why."""
    update = CPUAdam()
    assert update.kernel.name == "torch" and reason in update.reason
    with pytest.raises(CannotCompile):
        CPUAdam(kernel="c++")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_to_which_others_can_write_is_not_loaded_from(cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    cpu_adam_says(f"{cache} is another user's, or others can write to it: make it your own alone (chown, chmod go-w)")
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another user, which root alone can")
def test_another_user_s_directory_is_not_loaded_from(cache):
    cache.mkdir()
    os.chown(cache, 12345, -1)
    cpu_adam_says(f"{cache} is another user's")


def test_without_a_home_directory_torch_is_taken(cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    cpu_adam_says("there is no home directory to keep a compiled kernel in: set XDG_CACHE_HOME to an absolute path")


def test_a_kernel_without_a_function_is_not_taken(cache, monkeypatch):
    """As of a compiler that leaves code out."""
    monkeypatch.setattr(kernels, "compiled", lambda *_: compiling.compiled())
    cpu_adam_says("lacks a function")


def cut(library):
    os.truncate(library, library.stat().st_size // 2)


def empty(library):
    os.truncate(library, 0)


def change(library):
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def open_to_others(library):
    library.chmod(0o777)


def put_a_link(library):
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


def forget(library):
    library.with_suffix(".sha256").unlink()


@pytest.mark.parametrize("damage", [cut, empty, change, open_to_others, put_a_link, forget])
def test_a_file_that_is_not_as_it_was_compiled_is_compiled_again(cache, damage, tmp_path):
    """Loading a file that was cut ends the process: it is tried in another one."""
    load(tmp_path).wait()
    library, = cache.glob("*.so")
    damage(library)
    with load(tmp_path) as process:
        assert process.wait() == 42
    assert library.stat().st_size > 1000 and library.lstat().st_mode == 0o100700


def load(folder, **environment):
    """A process that compiles small.cpp, loads it and exits with its answer. It does not import torch."""
    program = f"import runpy, sys; from pathlib import Path; there = runpy.run_path({compiling.__file__!r}); " \
              "sys.exit(there['compiled'](Path('small.cpp')).answer())"
    return subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=os.environ | environment)


TOGETHER = """#!/bin/sh
touch "began.$$"
until test "$(ls began.* | wc -l)" = 2; do sleep 0.05; done
exec {compiler} "$@"
"""


def test_two_jobs_that_compile_at_once_both_load_a_whole_file(cache, tmp_path):
    compiler = tmp_path / "together"
    compiler.write_text(TOGETHER.format(compiler=shutil.which("c++")))
    compiler.chmod(0o700)
    with load(tmp_path, CXX=str(compiler)) as one, load(tmp_path, CXX=str(compiler)) as other:
        assert (one.wait(), other.wait()) == (42, 42)
    assert len(list(tmp_path.glob("began.*"))) == 2, "they did not compile at once"
    with load(tmp_path, CXX=str(compiler)) as third:
        assert third.wait() == 42
    assert len(list(tmp_path.glob("began.*"))) == 2, "what is there was compiled again"
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".so"]


def test_a_file_is_on_the_disk_before_it_is_named(cache, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda here, there: (done.append(os.stat(here).st_ino), replace(here, there)))
    compiling.compiled()
    assert len(done) == 4 and done[0] == done[1] and done[2] == done[3]
