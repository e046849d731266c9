"""What may befall ranks on several hosts: the rank and the host to blame are named on every host that hears of it."""

import itertools
import signal
import time

import pytest
from hosts_kit import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SOON, SILENCE = 5, 40  # seconds after a failure, and where only silence tells
TRAIN = """
import os, sys, time
import torch
from refimpl.comm import launch

def fn(comm):
    for step in range(10000):
        comm.all_reduce(torch.ones(3), label="gradients")
        if step == 3:
            print(f"trains {comm.rank}\\n", end="", flush=True)
        BEFALLS
        time.sleep(0.02)

launch(fn, int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT)
"""


def training(befalls="pass", timeout=60):
    return TRAIN.replace("BEFALLS", befalls).replace("TIMEOUT", str(timeout))


def told_within(done, words, since, seconds, hosts):
    """Each of these hosts has said so in time, and nothing else is an error's first line there."""
    took = {}
    for name in hosts:
        at = done[name].when(words)
        assert at is not None, f"{name} has not said {words!r}:\n{done[name].text}"
        took[name] = round(at - since, 1)
    print("seconds until named:", took)
    assert max(took.values()) < seconds, took


RAISES = 'raise ValueError("on purpose")', "rank {rank} raised ValueError: on purpose", SOON
DOES = {  # {what a rank does: (its code, the error on all hosts, seconds)}
    "raises": RAISES, "raises, and its clock is an hour off": RAISES,  # notes have no time in them
    "returns": ("return", "rank {rank} returned after 21 collectives; rank {other} waits for it in all_reduce of "
                "gradients", SOON + 1),
    "calls another": ("comm.all_gather(torch.ones(2))", "rank {rank} began other collectives than rank {other}, from "
                      "#22 on", 15),
    "calls another, as is compared": ("comm.all_gather(torch.ones(2))", "raised CollectiveMismatch: rank {rank} "
                                      "differs in a collective:", 2)}
CLOCK = "import os, time\nreal = time.time\ntime.time = lambda: real() + 3600 * (os.environ['RANK'] == '1')\n"


@pytest.mark.parametrize(("does", "rank", "how"), [
    *itertools.product(["raises"], [0, 1], ["torchrun", "forked"]), ("returns", 0, "forked"), ("returns", 1, "forked"),
    ("raises, and its clock is an hour off", 1, "forked"), ("calls another", 1, "forked"),
    ("calls another, as is compared", 1, "forked")])
def test_a_rank_that_goes_astray(tmp_path, does, rank, how):
    """Though it is the one that keeps the store, or whose agent does."""
    line, words, seconds = DOES[does]
    befalls = f"""if step == 20 and comm.rank == {rank}:
            print("astray", flush=True)
            {line}"""
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(CLOCK * ("clock" in does) + training(befalls, timeout=5), how=how,
                        REFIMPL_COMM_DEBUG=str(int("compared" in does)))
        began = run.heard("astray")
        done = run.wait(30)
    here, there = (f"{each} ({hosts.names[each]})" for each in (rank, 1 - rank))
    told_within(done, words.format(rank=here, other=there), began, seconds, hosts.names)
    assert all(each.code for each in done.values())
    other = done[hosts.names[1 - rank]].text
    assert does != "raises" or "where it was raised:" in other and "in fn" in other


@pytest.mark.parametrize("how", ["torchrun", "forked"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed(tmp_path, rank, how):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(training(), ranks=2, how=how)
        run.heard("trains", 4)
        began = time.monotonic()
        run.signal(rank, signal.SIGKILL)
        done = run.wait(30)
    if rank:  # where the store's host has lost its rank, others read what it has written, or that the host is lost
        told_within(done, "RankError: rank 3 (hostb) ended without a word", began, SOON + 1, ["hosta"])
    else:
        told_within(done, "hosta", began, SOON + 1, ["hostb"])
    assert all(each.code for each in done.values())


LOST = "rank 1 (hostb) has lost hosta, where torch's store and rank 0 (hosta) are, since "
QUICK = "import refimpl.comm.hosts.verdicts as verdicts; verdicts.SILENT = {}\n"


@pytest.mark.parametrize("silent", [30, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped(tmp_path, rank, silent):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(QUICK.format(silent) + training(), how="forked")
        run.heard("trains", 2)
        began = time.monotonic()
        run.signal(rank, signal.SIGSTOP)
        run.heard("RankError: ", seconds=60)
        done = run.wait(0)
        words = "rank 1 (hostb) has not been heard of for " if rank else LOST  # rank 0 keeps the store
        told_within(done, f"RankError: {words}", began, silent + 10, [hosts.names[1 - rank]])


@pytest.mark.parametrize("seconds", [3, 10])
def test_a_cable_that_is_out_for_a_while_ends_nothing(tmp_path, seconds):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(training("step == 300 and sys.exit(print('done', flush=True))"), how="forked")
        run.heard("trains", 2)
        hosts.cut("hostb")
        time.sleep(seconds)
        hosts.mend("hostb")
        run.heard("done", 2)


@pytest.mark.parametrize("how", ["torchrun", "forked"])
@pytest.mark.parametrize("silent", [30, 5])
def test_a_cable_that_is_out_for_good(tmp_path, silent, how):
    """Each side names the other."""
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(QUICK.format(silent) + training(), how=how)
        run.heard("trains", 2)
        began = time.monotonic()
        hosts.cut("hostb")
        run.heard("RankError: ", 2, seconds=60)
        done = run.wait(0)
        told_within(done, "RankError: rank 1 (hostb) has not been heard of for ", began, silent + 10, ["hosta"])
        told_within(done, f"RankError: {LOST}", began, silent + 10, ["hostb"])


@pytest.mark.parametrize("silent", [30, 5])
@pytest.mark.parametrize("off", ["hosta", "hostb"])
def test_a_host_that_is_off(tmp_path, off, silent):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(QUICK.format(silent) + training(), how="forked")
        run.heard("trains", 2)
        began = time.monotonic()
        hosts.power_off(off)
        done = run.wait(60)
        words = {"hosta": f"RankError: {LOST}", "hostb": "RankError: rank 1 (hostb) has not been heard of for "}[off]
        told_within(done, words, began, silent + 10, ["hostb" if off == "hosta" else "hosta"])


def test_a_rank_that_does_something_else(tmp_path):
    """The others wait for as long as it computes; when it sleeps, it is named, and it does not sleep on."""
    befalls = """if step == 20 and comm.rank == 1:
            until = time.monotonic() + 6
            while time.monotonic() < until:
                pass
            print("sleeps", flush=True)
            time.sleep(100)"""
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(training(befalls, timeout=4), how="forked")
        began = run.heard("sleeps")
        done = run.wait(40)
        told_within(done, "RankError: no rank computed or ended a collective for 4 s: rank 1 (hostb) has been outside "
                    "of collectives for", began, 4 + 3 + SOON, ["hosta"])
        assert "rank 0 (hosta) waits in all_reduce of gradients, (3,) float32, op sum" in done["hosta"].text
        assert "time.sleep(100)" in done["hosta"].text and done["hostb"].code == 1, done["hostb"].text


def test_a_host_that_comes_late(tmp_path):
    with Hosts(tmp_path / "h") as hosts:
        run = hosts.run(training("return"), how="forked", late={"hostb": 40})
        done = run.wait(80)
        assert {each.code for each in done.values()} == {0}, run.text
        for seconds in (15, 30):
            assert f"ranks [1] of 2 have not begun after {seconds} s; hosta has rank 0. Expected WORLD" in run.text


def test_a_rank_that_ends_while_a_host_is_late(tmp_path):
    with Hosts(tmp_path / "h", "hosta", "hostb", "hostc") as hosts:
        run = hosts.run(QUICK.format(3) + training("return"), how="forked", late={"hostc": 4})
        time.sleep(2)
        run.signal(1, signal.SIGKILL)
        done = run.wait(30)
        for name in ("hosta", "hostc"):
            assert "RankError: rank 1 (hostb) came, and ended before all ranks had come" in done[name].text, run.text


def test_a_disk_that_is_slow_ends_nothing(tmp_path):
    """A rank may be quiet for longer than `timeout` while it writes or reads files; what it does then is told."""
    befalls = """if step == 20:
            from refimpl.comm.texts import gather_results
            gather_results(comm, lambda: time.sleep(7 * comm.rank), "save: files that are written")
            return"""
    with Hosts(tmp_path / "h") as hosts:
        done = hosts.run(training(befalls, timeout=3), how="forked").wait(40)
        assert {each.code for each in done.values()} == {0}, done
