"""Saved states of hosts: in a folder that they share, in copies of one, and each part on its own host's disk."""

import json
import re
import shutil

import pytest
from hosts_kit import ROOT, Hosts, missing
from own_disks_kit import zeroed
from together_kit import alone

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# Train from where a saved state is, if there is one, up to STEPS; each rank prints what its losses were.
TRAIN = """
import json, os, sys
from together_kit import engine_of, run
from refimpl import saving
from refimpl.comm import launch

axes, options, steps, shared = json.loads(os.environ["WHAT"])

def fn(comm):
    engine, folder, found = engine_of(comm, "gpt", axes, **options), os.environ["FOLDER"], []
    if shared:
        saving.check_shared(comm, folder, 1)
    if saving.exists(comm, folder, shared=shared):
        engine.load(folder)
    for step in range(engine.steps, steps):
        found += run(engine, 1, step)
        print("step", step, flush=True)
        engine.save(folder, shared=shared)
    return found

print("found", json.dumps(launch(fn, int(os.environ["WORLD_SIZE"]))[0]))
"""
TP, FOUR, PP = ({"dp": 2, "tp": 2}, {"zero": 2}), ({"dp": 4}, {"zero": 3}), ({"pp": 4}, {"micro_batches": 4})


def began(hosts, what, steps, shared, ranks=2, folder=None):
    return hosts.run(TRAIN, ranks, "forked", WHAT=json.dumps([*what, steps, shared]),
                     FOLDER=str(folder or hosts.own / "saved"))


def found(run, seconds=60):
    """The losses of a run that went well."""
    done = run.wait(seconds)
    assert all(each.code == 0 for each in done.values()), run.text
    return json.loads(re.search("found (.*)", done["hosta"].text)[1])


def disks(hosts):
    """{host: its own folder of saved states, from outside}."""
    return {name: hosts.folder / name / "own" / "saved" for name in hosts.names}


def expect(losses, first):
    expected = alone("gpt", first + len(losses))[first:]
    assert losses
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_hosts_that_share_no_folder_go_on_under_any_mesh_and_on_more_hosts(tmp_path):
    with Hosts(tmp_path / "two") as hosts:
        for number, what in enumerate((TP, FOUR)):
            expect(found(began(hosts, what, number + 1, False)), number)
        kept = disks(hosts)
        assert all(len(list(folder.iterdir())) == 1 for folder in kept.values())
    with Hosts(tmp_path / "three", "hosta", "hostb", "hostc") as hosts:
        for name, folder in kept.items():
            shutil.copytree(folder, disks(hosts)[name])
        expect(found(began(hosts, PP, 3, False, (1, 2, 1))), 2)
        assert all(len(list(folder.iterdir())) == 1 for folder in disks(hosts).values())


@pytest.mark.parametrize("host", ["hosta", "hostb"])
def test_a_host_that_goes_off_in_the_middle_of_saves_leaves_the_old_or_the_new_state(tmp_path, host):
    with Hosts(tmp_path / "h") as hosts:
        run = began(hosts, TP, 1000, False)
        run.heard("step 3", 4)
        hosts.power_off(host)
        steps = max(int(step) for step in re.findall(r"step (\d+)", run.text))
        kept = disks(hosts)
    with Hosts(tmp_path / "again") as hosts:
        for name, folder in kept.items():
            shutil.copytree(folder, disks(hosts)[name])
        losses = found(began(hosts, FOUR, steps + 3, False))
        first = steps + 3 - len(losses)
        assert first in (steps, steps + 1)  # that of the last save but one, or the last
        expect(losses, first)


def test_folders_that_are_not_shared_are_told_before_the_first_step(tmp_path):
    with Hosts(tmp_path / "h") as hosts:
        shared = began(hosts, TP, 1, True, folder=hosts.shared / "saved")
        expect(found(shared), 0)
        done = began(hosts, TP, 2, True).wait(30)
    for each in done.values():
        assert each.code == 1 and not re.search(r"^step", each.text, re.MULTILINE)
        assert re.search(r"own/saved is not shared by all ranks: rank 0 \(hosta\) has made shared-\w+ there, and "
                         r"within 1 s ranks 2 and 3 \(hostb\) did not see it. Mount one folder", each.text)


@pytest.mark.parametrize("what", [TP, FOUR], ids=["tp", "dp"])
def test_a_copy_that_is_bad_on_one_host_is_named(tmp_path, what):
    with Hosts(tmp_path / "h") as hosts:
        found(began(hosts, TP, 1, True, folder=hosts.shared / "saved"))
        for name in hosts.names:
            shutil.copytree(hosts.shared / "saved", disks(hosts)[name])
        path, = disks(hosts)["hostb"].glob("step-*/rank-00003*")
        zeroed(path)
        script = TRAIN.replace("saving.check_shared(comm, folder, 1)", "pass")
        done = hosts.run(script, 2, "forked", WHAT=json.dumps([*what, 2, True]),
                         FOLDER=str(hosts.own / "saved")).wait(30)
    for each in done.values():
        assert each.code == 1
        assert re.search(r"SavedStateError: on hostb: \S+/rank-00003.safetensors is damaged", each.text)


def test_the_example_says_before_the_first_step_that_hosts_differ(tmp_path):
    """One host has a state and the other has none. Ranks that ask their own disk part: some load, others train."""
    script = (ROOT / "examples" / "train_3d.py").read_text()
    for old, new in (("parse_args()", "parse_args(os.environ['G'].split())"), ("import torch", "import os, torch"),
                     ("options.directory)  # now", "options.directory, 1)  # now")):
        script = script.replace(old, new)
    with Hosts(tmp_path / "h") as hosts:
        given = f"--steps 1 --rows 8 --micro-batches 2 --tp 2 --directory {hosts.shared / 'saved'}"
        run = hosts.run(script, 1, "forked", G=given)
        assert all(each.code == 0 for each in run.wait(40).values()), run.text
        shutil.copytree(hosts.shared / "saved", disks(hosts)["hosta"])
        done = hosts.run(script, 1, "forked", G=given.replace(str(hosts.shared), str(hosts.own))).wait(40)
    for each in done.values():
        assert each.code == 1 and "step 1:" not in each.text
        assert re.search(r"not shared by all ranks: rank 0 \(hosta\) has made.* rank 1 \(hostb\) did not", each.text)
