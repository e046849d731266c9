"""Two threads of a rank that others have started: one writes this rank's note and reads all others', one ends a wait
that is in vain.

The first may itself have to wait for the store, where a cable is out: so the second looks at the clock.
"""

import contextlib
import os
import signal
import threading
import time
import zlib

from ...ranks.errors import RankError
from . import sockets, terminated, verdicts
from .notes import Note, OwnNote, PeerNotes, ReportedFailure, read_record

EVERY = 0.5  # seconds between two notes; on many ranks more, as one store serves all
HURRY = 0.1  # seconds between two notes of a rank that has failed
SOON = 0.005  # seconds after a rank's return until it looks whether the others have, too; from then on half more
MERCY = 1.0  # seconds in which a rank that knows of a failure may raise by itself
FIRM = 10.0  # seconds after which it is interrupted, as by Ctrl-C
HEARD = 3.0  # seconds that a rank which failed stays, until all others know
SAID = 2.0  # seconds in which the failure that broke a connection may come to the store
UNTIL_DEAD = 4.0  # seconds in which a rank that is gone is told from one that is late


class PeerWatch:
    """Writes and reads notes while this rank runs a function. `verdict`: the ReportedFailure that ends it, or None.

    - `store`: torch's, of this launch alone. `again`: a function that opens it once more, for a thread of its own.
    - `record`: in which this rank's communicators keep their orders. `timeout`: seconds for which no rank goes on.
    """

    def __init__(self, store, again, rank, hosts, record, timeout):
        self._main_store, self._again, self.rank, self.hosts = store, again, rank, hosts
        self.size, self._timeout = len(hosts.facts), timeout
        self._every = max(EVERY, self.size / 64)
        self._own, self._others = OwnNote(record, self.size), PeerNotes()
        self._records = [b""] * self.size
        self._spins = "nccl" in hosts.facts[rank].get("backend", "")  # who waits for a GPU is never quiet
        self.verdict, self._known_at = None, 0.0
        self._lost, self._answered = None, time.monotonic()  # when and how the store was lost; when it last answered
        self._suspicion, self._idle = "", None  # of `stuck`; counts of notes when no rank went on
        self._terminated, self._terminated_at = terminated.Terminated(), 0.0
        self._asks = self._raises = self.interrupted = False  # for records; the main thread has come to its end
        self._wake, self._read, self._over = threading.Event(), threading.Condition(), threading.Event()

    # --- the main thread's side ------------------------------------------------------------------------------------

    def __enter__(self):
        store = self._main_store
        store.set(f"note {self.rank}", self._own.note.pack())
        store.set(f"record {self.rank}", b"")
        store.add("here", 1)
        works = {"refimpl notes": self._exchange_notes, "refimpl watch": self._watch_the_clock}
        self._threads = [threading.Thread(target=work, daemon=True, name=name) for name, work in works.items()]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._wake.set()
        self._terminated.wake()
        talks, looks = self._threads
        looks.join()
        talks.join(1)  # not for ever: the store may not answer
        self._terminated.close()

    def wait_for_all(self):
        """Wait until all ranks, which have just met, are watched. RankError for those that have ended in between."""
        until = time.monotonic() + verdicts.SILENT
        while self._main_store.add("here", 0) < self.size:
            if time.monotonic() > until:
                gone = [rank for rank in range(self.size) if not self._main_store.check([f"note {rank}"])]
                raise RankError(f"{self.hosts.format_ranks(gone)} came, and ended before all ranks had come: what it "
                                "printed says why", gone)
            time.sleep(HURRY)

    def returned(self):
        """Note that the function has returned here; wait until it has on all ranks. Raises if another rank fails."""
        self._own.note.returned = True
        self._wake.set()
        while not (self._others.notes and all(note.returned for note in self._others.notes)):
            if self.verdict or self._store_is_lost():
                raise self.error(None) or verdicts.error_of(self._without_store(), self.hosts, self.rank)
            self._wait_for_news(self._every)

    def failed(self, failure):
        """Write how this rank has failed, and wait until all others know, or HEARD seconds."""
        failure.first = self.verdict is None
        self._own.note.failure, self._own.note.knows, self._raises = failure, True, True
        until = time.monotonic() + max(HEARD, 3 * self._every)
        self._wake.set()
        while time.monotonic() < until and not self._store_is_lost():
            notes = self._others.notes
            if notes and all(note.knows or self._others.silent(rank) > verdicts.DEAD or note.returned
                             for rank, note in enumerate(notes)):
                return
            self._wait_for_news(HURRY)

    def error(self, began, doing=""):
        """Return the exception that says why a connection of this rank broke, or None if nobody knows. `began`: a text
        about this rank's own error, which is added."""
        failure = self._wait_for_verdict()
        if failure is None:
            return None
        error = verdicts.error_of(failure, self.hosts, self.rank, doing)
        more = [self.hosts.in_text(line) for line in verdicts.other_failures(failure, self._others.notes)]
        if more or began:
            error = type(error)("\n".join([str(error), *more, *([began] if began else [])]), error.ranks)
        return error

    def _wait_for_verdict(self):
        """Wait for the verdict: two seconds for what a rank has written, then for who is silent."""
        began = time.monotonic()
        self._own.note.knows = self._raises = self._asks = True
        self._wake.set()
        while not self.verdict and (waited := time.monotonic() - began) < SAID + UNTIL_DEAD:
            if self._store_is_lost():
                return self._without_store()
            if waited > SAID and self._others.notes:
                found = verdicts.mismatched(self._records_now()) or verdicts.ended_silently(self._others, self.hosts)
                if found:
                    self._conclude(found)
                    break
            self._wait_for_news(HURRY)
        if self.verdict:
            self.failed(ReportedFailure(self.verdict.text, self.verdict.ranks, self.verdict.kind, self.verdict.trace,
                                consequence=self.verdict.consequence))
        return self.verdict

    def _wait_for_news(self, seconds):
        with self._read:
            self._read.wait(seconds)

    # --- the thread that talks to the store --------------------------------------------------------------------------

    def _exchange_notes(self):
        keys, records = ([f"{what} {rank}" for rank in range(self.size)] for what in ("note", "record"))
        self._own.writer, hurry = threading.get_ident(), SOON
        try:
            store = self._again()
            while not self._over.is_set():
                changed = self._own.refresh()
                if changed or self._own.note.count == 1:
                    store.set(f"record {self.rank}", zlib.compress(bytes(self._own.record), 1))
                store.set(f"note {self.rank}", self._own.note.pack())
                if store.add("here", 0) >= self.size:
                    self._others.update([Note.read(each) for each in store.multi_get(keys)])
                    if self._asks or self._is_judge() or self._own.note.quiet > self._timeout / 2:
                        self._records = [read_record(each) for each in store.multi_get(records)]
                    self._judge()
                self._answered = time.monotonic()
                with self._read:
                    self._read.notify_all()
                hurry = hurry * 1.5 if self._own.note.returned else SOON
                hurry = HURRY if self._raises else hurry
                self._wake.wait(self._every if hurry == SOON else min(hurry, self._every))
                self._wake.clear()
        except (RuntimeError, ValueError) as error:  # the store is gone, or this process ends
            self._lost = time.strftime("%H:%M:%S"), error
            self._over.wait()

    def _judge(self):
        """Find a failure in what was read; write it, if this rank is the first that sees it."""
        if found := verdicts.first_written(self._others.notes):
            self._accept_or_wait(found)
            return
        if self._timeout == float("inf") or self._over.is_set():
            return
        me = self._own.note
        found = self._said_twice(verdicts.no_progress(self._others, self.hosts, self._timeout, self._records_now()))
        if not found and (self._spins or me.quiet > verdicts.SILENT / 3):
            found = verdicts.went_silent(self._others, self.hosts)
        if not found and self._is_judge():
            suspicion = verdicts.stuck(self._others.notes, self._records_now(), self.hosts)
            if suspicion and suspicion.text == self._suspicion:  # twice: a message may have been under way
                found = suspicion
            self._suspicion = suspicion.text if suspicion else ""
        if found:
            self._own.note.failure = found
            self._conclude(found)
            self._wake.set()

    def _said_twice(self, found):
        """Return a finding once each rank has said it again: a note may be older than what has just ended the wait."""
        counts = [note.count for note in self._others.notes]
        self._idle = (self._idle or counts) if found else None
        again = found and all(now > before or note.returned for now, before, note in zip(
            counts, self._idle, self._others.notes, strict=True))
        return found if again else None

    def _accept_or_wait(self, found):
        """Make a failure that a rank wrote the verdict. SIGTERM alone is no cause: a rank that ended without a word
        comes before it, and it takes a while until that is seen."""
        if found.kind == verdicts.TERMINATED:
            self._terminated_at = self._terminated_at or time.monotonic()
            late = time.monotonic() - self._terminated_at > verdicts.DEAD + 2 * self._every
            found = verdicts.ended_silently(self._others, self.hosts) or (found if late else None)
        if found:
            self._conclude(found)

    def _is_judge(self):
        """Tell whether it is this rank that looks at all records: the lowest that waits."""
        waits = [rank for rank, note in enumerate(self._others.notes) if note.doing and note.quiet > verdicts.SETTLED]
        return bool(waits) and waits[0] == self.rank

    def _records_now(self):
        """Return the records that were read and are still as they were."""
        return [record if zlib.crc32(record) == note.digest and (note.returned or note.quiet > verdicts.SETTLED)
                else read_record(b"") for record, note in zip(self._records, self._others.notes, strict=True)]

    def _conclude(self, failure):
        if self.verdict is None:
            self.verdict, self._known_at = failure, time.monotonic()
        self._own.note.knows = True

    # --- the thread that looks at the clock --------------------------------------------------------------------------

    def _watch_the_clock(self):
        while not self._over.is_set():
            if self._terminated.wait(EVERY):
                self._say_terminated()
            note = self._own.note
            if self._lost or time.monotonic() - self._answered > 4 * self._every:
                self._own.refresh()  # the other thread waits for the store, or has ended
                quiet = self._spins or note.quiet > verdicts.SILENT
                if self._store_is_lost() and quiet and self._timeout < float("inf"):
                    self._conclude(self._without_store())
            if self.verdict is None or self._raises or note.returned:
                continue
            known = time.monotonic() - self._known_at
            if known > MERCY:
                sockets.close_all()
            if known > FIRM and not self.interrupted:
                self._interrupt()

    def _say_terminated(self):
        """Write that this rank is being ended, and end."""
        note = self._own.note
        note.failure = note.failure or ReportedFailure(f"{self.hosts.format_ranks([self.rank])} was ended by SIGTERM",
                                                       [self.rank], verdicts.TERMINATED, consequence=True)
        self._wake.set()
        self._wait_for_news(2 * EVERY)
        terminated.end()

    def _store_is_lost(self):
        return self._lost is not None or time.monotonic() - self._answered > verdicts.SILENT

    def _without_store(self):
        """Return the ReportedFailure of a rank that has lost the store."""
        where = os.environ.get("MASTER_ADDR", "?")
        since = self._lost[0] if self._lost else time.strftime(
            "%H:%M:%S", time.localtime(time.time() - (time.monotonic() - self._answered)))
        ranks = self.hosts.groups().get(where, [0])
        how = "its process has ended, rank 0's or torchrun's" if self._lost else "it does not answer"
        return ReportedFailure(f"{self.hosts.format_ranks([self.rank])} has lost {where}, where torch's store and "
                               f"{self.hosts.format_ranks(ranks)} are, since {since}: {how}; the host is down, or cut "
                               "off from this one, or what it printed says why", ranks)

    def _interrupt(self):
        """Raise KeyboardInterrupt in the main thread, which waits elsewhere, unless the user handles SIGINT."""
        self.interrupted = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
