"""For how long no rank has gone on, with processes and times that are given; and memory that ranks share."""

import os
import subprocess
import sys
import time

import pytest

from refimpl.ranks import signs
from refimpl.ranks.signs import RECORD, Signs, cpu_seconds, map_own_record, map_record, shared_records


@pytest.fixture
def given(monkeypatch):
    """What the clock and the CPU times of two ranks, 7 and 8, read."""
    class Given:
        now, used = 0.0, {7: 3.0, 8: 5.0}

    monkeypatch.setattr(signs.time, "monotonic", lambda: Given.now)
    monkeypatch.setattr(signs, "cpu_seconds", lambda pids: {pid: Given.used[pid] for pid in pids})
    return Given


def test_ranks_go_on_while_one_uses_more_than_a_percent_of_a_core(given):
    look, quiet = Signs(60), []
    for second in range(1, 100):
        given.now = float(second)
        share = 0.003 if second < 30 else 0.2 if second < 60 else 0.0
        given.used = {7: given.used[7] + share, 8: given.used[8] + 0.0027}
        quiet.append(look.look([7, 8], b"same"))
    assert quiet[:5] == [0, 1, 2, 3, 4] and quiet[27] == 27  # the first look has nothing to compare with
    assert max(quiet[31:59]) == 0 and quiet[-1] == 40  # a rank that begins to compute is noticed in two looks
    assert look.every == 1 and look.next == 100


def test_a_little_adds_up_and_what_is_said_or_written_is_a_sign(given):
    look = Signs(1)
    assert look.every == 0.25 and look.look([7, 8], b"a") == 0
    given.now, given.used = 2.0, {7: 3.05, 8: 5.0}  # 2.5 %, but 5 ticks: more than 2 and 1 %
    assert look.look([7, 8], b"a") == 0
    given.now = 3.0
    assert look.look([7, 8], b"a") == 1 and look.look([7, 8], b"b") == 0
    given.now = 4.0
    look.heard()
    given.now = 4.5
    assert look.look([8], b"b") == 0.5  # rank 7 has returned


def test_what_a_process_and_its_children_use_is_counted():
    spin = "import subprocess, sys, time\nend = time.process_time() + {0}\nwhile time.process_time() < end: pass\n"
    code = spin.format(0.2) + f"subprocess.run([sys.executable, '-c', {spin.format(0.3)!r}])\n" \
        f"child = subprocess.Popen([sys.executable, '-c', {spin.format(0.4)!r} + 'time.sleep(100)'])\n" \
        "print('spun', flush=True)\ntime.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"spun\n"
        deadline = time.monotonic() + 60
        while cpu_seconds([process.pid])[process.pid] < 0.9 and time.monotonic() < deadline:
            time.sleep(0.05)
        used = cpu_seconds([process.pid, 2**30])
        os.killpg(process.pid, 9)
    assert 0.9 <= used[process.pid] < 3 and used[2**30] == 0


def test_records_are_of_one_rank_each():
    with shared_records(3) as (file, read):
        first, last = map_record(file.fileno(), 0), map_record(file.fileno(), 2)
        first[5], last[-1] = 1, 2
        content = read()
        assert len(content) == 3 * RECORD and (content[5], content[-1], sum(content)) == (1, 2, 3)
        del first, last


def test_a_rank_that_sleeps_says_that_it_goes_on(monkeypatch):
    monkeypatch.setattr(signs, "_record", None)
    signs.beat()  # this process is no rank
    with shared_records(2) as (file, read):
        map_own_record(file.fileno(), 1)
        seen = [read()]
        for _ in range(2):
            signs.beat()
            seen.append(read())
        assert len(set(seen)) == 3 and all(each[:-8] == bytes(2 * RECORD - 8) for each in seen)
        monkeypatch.setattr(signs, "_record", None)
