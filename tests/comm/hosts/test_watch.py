"""What a rank concludes from notes: that no rank goes on is said once each rank has said it again."""

from refimpl.comm.hosts.notes import Note, OwnNote, PeerNotes
from refimpl.comm.hosts.patience import patience, patient
from refimpl.comm.hosts.watch import PeerWatch
from refimpl.ranks import signs
from refimpl.ranks.signs import RECORD, set_own_record


def watch_of(*notes):
    """A PeerWatch of which the notes alone are there."""
    watch = object.__new__(PeerWatch)
    watch._idle, watch._others = None, PeerNotes(list(notes))
    return watch


def test_a_finding_is_told_once_all_notes_are_newer():
    watch = watch_of(Note(count=5), Note(count=9))
    assert watch._said_twice("idle") is None
    watch._others.notes = [Note(count=6), Note(count=9)]
    assert watch._said_twice("idle") is None, "rank 1's note is the one from before"
    watch._others.notes = [Note(count=7), Note(count=10)]
    assert watch._said_twice("idle") == "idle"


def test_a_finding_that_ends_begins_anew():
    watch = watch_of(Note(count=5))
    assert watch._said_twice("idle") is None and watch._said_twice(None) is None
    watch._others.notes = [Note(count=6)]
    assert watch._said_twice("idle") is None


def test_a_rank_that_has_returned_says_no_more():
    watch = watch_of(Note(count=5), Note(count=9, returned=True))
    assert watch._said_twice("idle") is None
    watch._others.notes[0].count = 6
    assert watch._said_twice("idle") == "idle"


def test_only_who_is_quiet_asks_for_its_children_and_every_few_seconds():
    """There may be many, and each is read from the kernel."""
    class Process:
        asked = 0

        def cpu_times(self):
            return 1.0, 0.5, 0.0, 0.0

        def children(self, recursive):
            self.asked += 1
            return [self, self]

    own = OwnNote(bytearray(RECORD), 1)
    own._process = process = Process()
    assert own._cpu_seconds(own._quiet_since + 1) == 1.5 and process.asked == 0
    for after, asked in ((6, 1), (7, 1), (10, 1), (12, 2), (13, 2)):
        assert own._cpu_seconds(own._quiet_since + after) == 3 * 1.5 and process.asked == asked


def test_the_end_of_patience_is_a_sign(monkeypatch):
    monkeypatch.setattr(signs, "_record", None)
    own = OwnNote(set_own_record(bytearray(RECORD)), 1)
    own.refresh()
    with patient(100.0):
        own._quiet_since -= 50
        own._used_since, own._used = own._quiet_since, own._used + 1e9  # no CPU time counts
        own.refresh()
        assert own.note.quiet > 49 and own.note.patience == 100.0 == patience()
    own._used += 1e9
    own.refresh()
    assert own.note.quiet < 1 and own.note.patience == 0.0
