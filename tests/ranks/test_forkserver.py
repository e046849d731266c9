"""The process that forks ranks, as its owner sees it: from a script, a notebook, an interrupted or a killed caller."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import psutil
import pytest
import torch
from patience import in_time, patiently
from rank_pool import gone

from refimpl.comm import launch
from refimpl.ranks import forkserver

ROOT = Path(__file__).resolve().parents[2]


def script(tmp_path, code):
    """A running script without `if __name__ == "__main__"`, of whose imports some are found in its folder only."""
    (tmp_path / "beside.py").write_text("def doubled(n):\n    return 2 * n\n")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}, cwd="/")


def test_a_script_runs_once_an_interrupt_leaves_nothing_and_its_ranks_die_with_it(tmp_path):
    process = script(tmp_path, """
        import time
        import psutil
        from beside import doubled
        from refimpl.comm import launch
        from refimpl.ranks import forkserver

        forkserver.PRELOADED = ("torch",)  # no rank makes an optimizer: half the time
        print("the script begins")

        def fn(comm):
            print("hello")
            return doubled(comm.rank)

        def sleep(comm):
            comm.barrier()
            print("asleep" if comm.rank == 0 else "")
            time.sleep(1000)
        print(launch(fn, 2))
        try:
            launch(sleep, 3)
        except KeyboardInterrupt:
            print("interrupted,", len(psutil.Process().children(recursive=True)), "process left")
        launch(sleep, 2)
    """)

    def lines_until(last):
        lines = []
        while not lines or lines[-1] != last:
            line = process.stdout.readline()
            assert line, f"the script ended after {lines}: {process.stderr.read()}"
            lines.append(line.strip())
        return lines

    with process:
        assert lines_until("[rank 0] asleep") == ["the script begins", "[rank 0] hello", "[rank 1] hello", "[0, 2]",
                                                  "[rank 0] asleep"]
        time.sleep(0.3)  # interrupted while it writes, Python may write the same again
        process.send_signal(signal.SIGINT)
        assert "interrupted, 1 process left" in lines_until("[rank 0] asleep")  # the fork server, for the next call
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) == 3  # two ranks and the fork server
        process.kill()
        assert gone(pids) and process.stderr.read() == ""


def test_a_notebook(tmp_path):
    """Functions of cells, their output in the cell, a traceback with the cell's lines, an interrupted kernel."""
    cells = ["""
        import os, signal, threading, time
        import psutil
        import torch
        from refimpl.comm import RankError, launch
        from refimpl.ranks import forkserver

        forkserver.PRELOADED = ("torch",)  # as in the script above

        def scale():
            return 3

        def fn(comm):
            print("in the cell", comm.rank)
            return comm.all_reduce(torch.tensor(scale())).item()
    """, "launch(fn, 2)", """
        def broken(comm):
            if comm.rank == 1:
                raise ValueError("on purpose")
            comm.barrier()

        try:
            launch(broken, 2)
        except RankError as error:
            print(error)
    """, """
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            launch(lambda comm: time.sleep(1000), 2)
        except KeyboardInterrupt:
            print("interrupted")
        [child.name() for child in psutil.Process().children(recursive=True)].__len__()
    """]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, answered, broke, interrupted = [cell.outputs for cell in notebook.cells]
    assert answered[0].text == "[rank 0] in the cell 0\n[rank 1] in the cell 1\n"
    assert answered[1].data["text/plain"] == "[6, 6]"
    assert broke[0].text.startswith("rank 1 raised ValueError: on purpose\n")
    assert '    raise ValueError("on purpose")\n' in broke[0].text
    assert interrupted[0].text == "interrupted\n" and interrupted[1].data["text/plain"] == "1"


def test_the_server_is_warm_and_stays():
    launch(lambda comm: None, 1)
    first = forkserver._current._process.pid
    launch(lambda comm: None, 2)
    assert forkserver._current._process.pid == first


def test_a_server_with_old_code_does_not_serve():
    launch(lambda comm: None, 1)
    server, modules = forkserver._current, {*forkserver.PRELOADED, "refimpl.comm.launching"}
    assert server.serves(forkserver._freshness(), modules)
    assert not server.serves("edited", modules)  # then `open_channel` starts another, as for one that has ended
    assert not server.serves(forkserver._freshness(), {*forkserver.PRELOADED, "somebody.elses.world"})


def faults(comm):
    """Page faults of making and freeing 16 MiB, once that has been done a few times."""
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2**22).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc")
def test_a_rank_keeps_what_tensors_free_for_the_next_ones(request):
    assert max(launch(faults, 2)) < 8
    request.getfixturevalue("another_server")
    assert min(launch(faults, 2)) >= 8  # pages of 2 MiB at the most


def test_a_server_that_was_killed_a_moment_ago_is_replaced(another_server):
    launch(lambda comm: None, 1)
    killed = forkserver._current._process
    os.kill(killed.pid, signal.SIGSTOP)  # it still seems to run, and never answers
    timer = threading.Timer(0.2, killed.kill)
    timer.start()
    assert launch(lambda comm: comm.rank, 2) == [0, 1] and forkserver._current._process is not killed
    timer.join()


def test_what_is_written_changes_freshness(tmp_path, monkeypatch):
    monkeypatch.setattr(forkserver, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("")
    before = forkserver._freshness()
    assert forkserver._freshness() == before
    os.utime(tmp_path / "a.py", (2e9, 2e9))
    seen = [before, forkserver._freshness()]
    for name in ("TRITON_INTERPRET", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_ALLOC_CONF"):  # read when torch is imported
        monkeypatch.setenv(name, "another value")
        seen.append(forkserver._freshness())
    monkeypatch.setenv("REFIMPL_ANYTHING", "1")
    assert forkserver._freshness() == seen[-1] and all(seen.count(each) == 1 for each in seen)


def test_a_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path("/nowhere"))])
    with pytest.raises(RuntimeError, match="(?s)did not start.*No module named"):
        forkserver.ForkServer("never", set())


ENDED = "process that forks ranks has ended .killed by SIGKILL; the kernel does that too when memory runs out."


@patiently
def test_after_the_fork_server_is_gone_the_next_call_starts_another(another_server, tmp_path):
    launch(lambda comm: None, 1)
    first = forkserver._current._process

    def fn(comm):
        (tmp_path / f"{comm.rank}").write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '100']).pid}")
        comm.barrier()
        if comm.rank == 0:
            os.kill(os.getppid(), 9)
        time.sleep(30)

    with in_time(5), pytest.raises(RuntimeError, match=ENDED):
        launch(fn, 2)
    with in_time(5):
        assert gone([int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()])
    assert launch(lambda comm: comm.rank, 2) == [0, 1] and forkserver._current._process is not first


def test_a_server_that_ends_by_an_error_is_quoted(another_server):
    launch(lambda comm: None, 1)
    with forkserver.open_channel("refimpl.comm.launching") as channel:
        channel.send(b"?")  # no request is as short
        assert forkserver._current._process.wait(60) == 1
    assert "struct.error" in forkserver.last_words()


def test_how_it_ended_is_said_with_its_status_or_its_signal(monkeypatch):
    for status, said in ((0, " (exit status 0)"), (3, " (exit status 3)"), (-15, " (killed by SIGTERM)"), (None, ""),
                         (-9, " (killed by SIGKILL; the kernel does that too when memory runs out)")):
        process = SimpleNamespace(wait=lambda seconds, status=status: status)
        monkeypatch.setattr(forkserver, "_current", SimpleNamespace(_process=process))
        assert forkserver.how_it_ended() == said
