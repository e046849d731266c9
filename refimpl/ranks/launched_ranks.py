"""The caller's side of a launch: start the ranks, take in their messages and output, notice how they end."""

import os
import pickle
import selectors
import signal
import socket
import time
from contextlib import ExitStack, suppress

from .failure_report import blame, died, explained, hung
from .forking import EVENT, STARTED
from .forkserver import fork_rank, how_it_ended, last_words, open_channel
from .output import STREAMS, RankOutput
from .signs import RECORD, Signs
from .worker import FAILED, LENGTH, READY, RETURNED

SECONDS_TO_START = 120  # for imports and the rendezvous; then the caller's timeout and limit begin
SECONDS_TO_ARRIVE = 0.05  # after a failure: an earlier one's message may still arrive
SECONDS_TO_EXPLAIN = 0.5  # after a broken connection: wait for the failure that broke it
SECONDS_TO_LEAVE = 5
GRACE = 0.25  # between two looks at ranks that wait for one that has returned: messages under way may still arrive
STDERR_KEPT = 4000  # bytes, for the message when a rank dies


class LaunchedRank:
    """Holds what the caller knows about one rank."""

    def __init__(self, number):
        self.number = number
        self.pid = self.status = self.failure = self.value = None
        self.ready = False
        self.noticed = 0.0  # the time at which its failure arrived
        self.inbox, self.stacks, self.errors = bytearray(), bytearray(), bytearray()
        self.ends = {}  # our ends of its control socket and of its pipes, by name


class LaunchedRanks:
    """Starts and watches the ranks of one launch, as a context. When it exits, no process is left.

    `payload` is the file that `worker.read_payload` reads, `records` the one of `signs.shared_records`, `listener` the
    bound socket that rank 0 takes over.
    """

    def __init__(self, world, payload, records, listener, read_records):
        self._world, self._ranks = world, [LaunchedRank(number) for number in range(world.size)]
        self._files, self._listener, self._read_records = [payload, records], listener, read_records
        self._signs = self._stuck = None
        self._output, self._events = RankOutput(world.size), bytearray()
        self._leaving = False  # whether ranks may end without that being a failure

    def __enter__(self):
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._channel = stack.enter_context(open_channel(type(self._world).__module__))
            self._selector.register(self._channel, selectors.EVENT_READ, (None, "channel"))
            ends = stack.enter_context(ExitStack())
            stack.callback(self._wait_until_gone)
            stack.callback(self._end)  # before the ends are closed
            for rank in self._ranks:
                self._start(rank, ends)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self, rank, ends):
        """Fork one rank with the far ends of its control socket and pipes; our ends go to `ends`, to be closed."""
        with ExitStack() as far:
            ours, theirs = socket.socketpair()
            rank.ends["control"] = ends.enter_context(ours)
            sent = [far.enter_context(theirs)]
            for name in (*STREAMS, "stacks"):
                ours, theirs = os.pipe()
                rank.ends[name] = ends.enter_context(open(ours, "rb", buffering=0))
                sent.append(far.enter_context(open(theirs, "wb", buffering=0)))
            sent += self._files + [self._listener] * (rank.number == 0)
            for name, end in rank.ends.items():
                os.set_blocking(end.fileno(), False)
                self._selector.register(end, selectors.EVENT_READ, (rank, name))
            fork_rank(self._channel, rank.number, [end.fileno() for end in sent])

    def _end(self):
        """Let the fork server kill the remaining ranks, and show what they printed. Runs in any case."""
        self._leaving = True
        self._dismiss()
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        while self._channel in self._selector.get_map() and time.monotonic() < deadline:
            self._listen(deadline)
        for rank in self._ranks:
            self._drain(rank)
            self._output.finish(rank.number)

    def _dismiss(self):
        with suppress(OSError):  # the fork server has ended, and its ranks with it
            self._channel.shutdown(socket.SHUT_WR)

    def _wait_until_gone(self):
        """Wait until the channel is closed, after the last rank's end.

        Usually `_end` has seen that already, unless it was interrupted by a second Ctrl-C or an error while printing.
        """
        self._dismiss()
        self._channel.settimeout(SECONDS_TO_LEAVE)
        with suppress(OSError):
            while self._channel.recv(1 << 16):
                pass

    # --- from start to answers -----------------------------------------------------------------------------------

    def results(self, timeout, limit):
        """Return what each rank returned, pickled, in rank order.

        RankError if one failed, if no rank has gone on for `timeout` seconds, or if not all returned within `limit`.
        """
        deadline, why = time.monotonic() + SECONDS_TO_START, f"did not answer within {SECONDS_TO_START:g} s"
        while any(rank.value is None for rank in self._ranks):
            failed = [rank for rank in self._ranks if rank.failure]
            patience = [rank.noticed + (SECONDS_TO_EXPLAIN if rank.failure.consequence else SECONDS_TO_ARRIVE)
                        for rank in failed]
            if failed and min(patience) <= time.monotonic():
                raise blame([r.failure for r in failed], {r.number for r in failed if r.status is not None},
                            lambda: self._world.explain(self._records()))
            if not failed and deadline <= time.monotonic():
                raise self._hung(why)
            self._listen(min([deadline, *patience, *([] if failed else [self._look(timeout)])]))
            if not self._signs and all(rank.ready for rank in self._ranks):
                self._signs = Signs(timeout)
                deadline, why = time.monotonic() + limit, f"did not return within {limit:g} s, the limit"
        self._leaving = True
        for rank in self._ranks:
            rank.ends["control"].shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        while any(rank.status is None for rank in self._ranks) and time.monotonic() < deadline:
            self._listen(deadline)
        return [rank.value for rank in self._ranks]

    def _look(self, timeout):
        """Look whether ranks go on, and return when to look again. RankError if none has for `timeout` seconds, if some
        wait for one that has returned, or if all wait for each other."""
        done = [rank for rank in self._ranks if rank.value is not None]
        if not self._signs or timeout == float("inf") and not done:  # they have not all started; they may hang
            return float("inf")
        if time.monotonic() < self._signs.next:
            return self._signs.next
        running = [rank for rank in self._ranks if rank.value is None]
        records = self._read_records()
        quiet = self._signs.look([rank.pid for rank in running], records)
        stuck = self._world.stuck(self._records(records), [rank.number for rank in done])
        if stuck and str(stuck) == str(self._stuck) and (done or quiet):
            raise stuck if done else self._hung("wait for each other")
        if quiet >= timeout:
            raise self._hung(f"did not go on: no rank computed, printed or ended a collective for {timeout:g} s")
        self._stuck = stuck
        self._signs.next = min(self._signs.next, time.monotonic() + GRACE) if done or stuck else self._signs.next
        return self._signs.next

    def _records(self, all_bytes=None):
        """Return the bytes of each rank's record."""
        all_bytes = self._read_records() if all_bytes is None else all_bytes
        return [all_bytes[begin:begin + RECORD] for begin in range(0, len(all_bytes), RECORD)]

    def _hung(self, why):
        """Ask the ranks without an answer for their stacks, and return the RankError that shows them."""
        self._leaving = True
        silent = [rank for rank in self._ranks if rank.value is None]
        for rank in [rank for rank in silent if rank.pid]:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)  # faulthandler then writes every thread's stack
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            more = self._listen(time.monotonic() + 0.1)
            if not more and all(rank.stacks for rank in silent):
                break
        stacks = {rank.number: rank.stacks.decode(errors="replace") for rank in silent}
        returned, records = [rank.number for rank in self._ranks if rank.value is not None], self._records()
        return explained(hung(stacks, why, returned, self._world, records), self._world.explain(records))

    # --- what comes in -------------------------------------------------------------------------------------------

    def _listen(self, deadline):
        """Wait until `deadline` for messages, output or events, and handle them. Returns False if none came."""
        wait = deadline - time.monotonic()
        ready = self._selector.select(None if wait == float("inf") else max(0, wait))
        for key, _ in ready:
            if key.fileobj in self._selector.get_map():  # False if it was drained meanwhile
                self._read(key.fileobj, *key.data)
        return bool(ready)

    def _read(self, end, rank, name):
        """Read the data available. Returns False if there is none, or at the end."""
        try:
            data = os.read(end.fileno(), 1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(end)
        if name == "channel":
            self._events += data
            self._note_events(over=not data)
        elif name == "control":
            self._heard()
            rank.inbox += data
            self._note_messages(rank)
        elif name == "stacks":
            rank.stacks += data
        else:
            self._output.feed(rank.number, name, data)
            self._heard()
            if name == "stderr":
                rank.errors = (rank.errors + data)[-STDERR_KEPT:]
        return bool(data)

    def _heard(self):
        if self._signs:
            self._signs.heard()

    def _drain(self, rank, names=(*STREAMS, "stacks", "control")):
        for name in names:
            end = rank.ends.get(name)  # None if the launch was interrupted before
            while end is not None and end in self._selector.get_map() and self._read(end, rank, name):
                pass

    def _note_messages(self, rank):
        while len(rank.inbox) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(rank.inbox)[0]
            if len(rank.inbox) < end:
                return
            kind, content = pickle.loads(rank.inbox[LENGTH.size:end])
            del rank.inbox[:end]
            if kind == READY:
                rank.ready = True
                continue
            if kind == RETURNED:
                rank.value = content
            elif kind == FAILED:
                self._fail(rank, content)
            self._drain(rank, STREAMS)
            self._output.finish(rank.number)

    def _note_events(self, over):
        while len(self._events) >= EVENT.size:
            number, pid, status = EVENT.unpack_from(self._events)
            del self._events[:EVENT.size]
            rank = self._ranks[number]
            if status == STARTED:
                rank.pid = pid
                continue
            self._drain(rank)
            self._output.finish(number)
            rank.status = status
            if not self._leaving and rank.failure is None:
                self._fail(rank, died(rank, time.monotonic(), self._world.hint))
        if over:
            self._kill_groups()
        if over and not self._leaving:
            raise RuntimeError(f"the process that forks ranks has ended{how_it_ended()}, and the ranks with it; the "
                               f"next launch starts another\n{last_words()}".rstrip())

    def _kill_groups(self):
        """Kill what ranks have started, if the fork server has ended before it could: the ranks end with it."""
        for rank in self._ranks:
            if rank.pid and rank.status is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)

    @staticmethod
    def _fail(rank, failure):
        rank.failure, rank.noticed = failure, time.monotonic()
