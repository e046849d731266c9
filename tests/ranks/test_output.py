"""What ranks print: in the caller's stdout and stderr, labelled, in rank order, nothing lost."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import tqdm
from rank_pool import failure

from refimpl.comm import launch
from refimpl.ranks.output import RankOutput


def test_lines_come_in_rank_order_and_labelled(capsys):
    def fn(comm):
        time.sleep(0.05 * (3 - comm.rank))  # the last rank is the first to print
        print(f"rank {comm.rank} of {comm.world_size}\nand a second line")
        print("to stderr", file=sys.stderr)

    launch(fn, 3)
    out, err = capsys.readouterr()
    assert out == "".join(f"[rank {r}] rank {r} of 3\n[rank {r}] and a second line\n" for r in range(3))
    assert err == "".join(f"[rank {r}] to stderr\n" for r in range(3))


def test_a_last_line_without_an_end_empty_lines_and_any_letters(capsys):
    launch(lambda comm: print("Σ → é\n\nno end", end=""), 2)
    assert capsys.readouterr().out == "".join(f"[rank {r}] Σ → é\n[rank {r}] \n[rank {r}] no end\n" for r in (0, 1))


def test_what_c_code_and_child_processes_write_is_seen(capsys):
    def fn(comm):
        ctypes.CDLL(None).puts(b"from C")
        os.write(2, b"from the descriptor\n")
        subprocess.run(["echo", "from a child"], check=True)

    launch(fn, 1)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] from C", "[rank 0] from a child"]
    assert err == "[rank 0] from the descriptor\n"


def test_nothing_is_lost_when_a_rank_is_killed_or_raises(capsys):
    def fn(comm):
        print("before the end", comm.rank, end="")
        if comm.rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    failure("", fn, 3)
    assert capsys.readouterr().out == "".join(f"[rank {r}] before the end {r}\n" for r in range(3))


def test_much_output_does_not_stop_a_rank(capsys):
    launch(lambda comm: print("\n".join(f"{comm.rank} {i}" for i in range(50_000))), 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {r} {i}" for r in range(2) for i in range(50_000)]


def test_a_progress_bar_leaves_its_last_state(capsys):
    launch(lambda comm: list(tqdm.tqdm(range(5))), 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"[rank {r}] 100%") and "5/5" in line for r, line in enumerate(lines))


def test_a_bar_that_wipes_itself_away_leaves_nothing_and_empty_lines_stay(capsys):
    output = RankOutput(1)
    output.feed(0, "stderr", b"\r 50%\r100%\r    \r")
    output.feed(0, "stdout", b"\n\r\n  \nlast\r\n")
    output.finish(0)
    assert capsys.readouterr() == ("[rank 0] \n[rank 0] \n[rank 0]   \n[rank 0] last\n", "")


def test_a_line_in_many_pieces_costs_no_more_than_its_length(capsys):
    output, start = RankOutput(1), time.process_time()
    for _ in range(10_000):
        output.feed(0, "stdout", b"x" * 4096)
    output.feed(0, "stdout", b"y\nz")
    output.finish(0)
    assert time.process_time() - start < 5  # 200 GB of copies if each piece were joined to those before it
    assert capsys.readouterr().out == f"[rank 0] {'x' * 40_960_000}y\n[rank 0] z\n"


def test_the_lowest_rank_that_runs_is_shown_as_it_prints(capsys):
    output = RankOutput(3)

    def fed(rank, text):
        output.feed(rank, "stdout", text)
        return capsys.readouterr().out

    def finished(rank):
        output.finish(rank)
        return capsys.readouterr().out

    assert fed(1, b"one\n") == ""
    assert fed(0, b"zero\nand") == "[rank 0] zero\n"
    assert finished(0) == "[rank 0] and\n[rank 1] one\n"
    assert fed(1, "é\n".encode()[:1]) + fed(1, "é\n".encode()[1:]) == "[rank 1] é\n"
    assert finished(2) == "" and fed(0, b"late\n") == "[rank 0] late\n"
    assert fed(2, b"waits\n") == "" and finished(1) == "[rank 2] waits\n"
