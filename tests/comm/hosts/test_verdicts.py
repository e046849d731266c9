"""From ranks' notes to who is to blame."""

import time

from refimpl.comm.hosts import verdicts
from refimpl.comm.hosts.facts import Hosts
from refimpl.comm.hosts.notes import Note, PeerNotes, ReportedFailure, read_record

HOSTS = Hosts([{"host": name, "address": name} for name in ("a", "a", "b")])
WAITS = "all_gather of x (#2)"


def others(*notes, silent=()):
    now = time.monotonic()
    return PeerNotes(list(notes), [now - (silent[rank] if silent else 0) for rank in range(len(notes))])


def test_a_note_is_read_as_it_was_written():
    note = Note(3, 1.5, WAITS, failure=ReportedFailure("x", [1]))
    assert Note.read(note.pack()) == note and Note.read(Note().pack()) == Note()


def test_the_first_that_was_written_is_to_blame():
    first, later = ReportedFailure("first", [2]), ReportedFailure("later", [0], first=False)
    broken = ReportedFailure("x", [1], consequence=True)
    notes = [Note(failure=later), Note(failure=broken), Note(failure=first)]
    assert verdicts.first_written(notes) == first and verdicts.first_written([Note()]) is None
    second = ReportedFailure("second", [0])
    notes[0].failure = second
    assert verdicts.first_written(notes) == second and verdicts.other_failures(second, notes) == ["first"]


def test_who_is_silent():
    notes = Note(doing=WAITS), Note(), Note()
    assert verdicts.went_silent(others(*notes), HOSTS) is None
    found = verdicts.went_silent(others(*notes, silent=(0, 0, 31)), HOSTS)
    assert found.ranks == [2] and "rank 2 (b) has not been heard of for 31 s: b is down or cut off, or" in found.text
    assert f"rank 0 (a) waits in {WAITS}" in found.text
    assert verdicts.ended_silently(others(*notes, silent=(0, 3, 3)), HOSTS).ranks == [1, 2]
    notes[2].returned = True
    assert verdicts.ended_silently(others(*notes, silent=(0, 0, 3)), HOSTS) is None


def test_none_goes_on():
    blank = [read_record(b"")] * 3
    quiet = [Note(quiet=61, doing=WAITS), Note(quiet=61, doing=WAITS), Note(quiet=61, since=61, at="x.py line 3\n")]
    found = verdicts.no_progress(others(*quiet), HOSTS, 60, blank)
    assert found.ranks == [2] and found.text == (
        "no rank computed or ended a collective for 60 s: rank 2 (b) has been outside of collectives for 61 s; "
        f"ranks 0 and 1 (a) wait in {WAITS}")
    assert "where rank 2 was:\nx.py line 3" in found.trace
    for one in (Note(quiet=1), Note(quiet=61, patience=1800)):
        assert verdicts.no_progress(others(*quiet[:2], one), HOSTS, 60, blank) is None
    assert verdicts.no_progress(others(*quiet[:2], Note(returned=True)), HOSTS, 60, blank).ranks == [0, 1]


def test_an_error_says_what_its_own_rank_waited_in():
    error = verdicts.error_of(ReportedFailure("rank 2 raised", [2], "CollectiveMismatch", "here"), HOSTS, 0, WAITS)
    assert str(error) == f"rank 2 (b) raised\nrank 0 (a) waited in {WAITS}\n\nhere"
    assert type(error).__name__ == "CollectiveMismatch" and error.ranks == (2,)
