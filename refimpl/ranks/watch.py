"""The caller's side of a launch: start the ranks, take in their messages and output, notice how they end."""

import os
import pickle
import selectors
import signal
import socket
import time
from contextlib import ExitStack, suppress

from .forking import EVENT, STARTED
from .forkserver import fork_rank, last_words, open_channel
from .output import STREAMS, RankOutput
from .report import blame, died, hung
from .worker import FAILED, LENGTH, READY, RETURNED

SECONDS_TO_START = 120  # for imports and the rendezvous; then the caller's timeout begins
SECONDS_TO_ARRIVE = 0.05  # after a failure: an earlier one's message may still arrive
SECONDS_TO_EXPLAIN = 0.5  # after a broken connection: wait for the failure that broke it
SECONDS_TO_LEAVE = 5
STDERR_KEPT = 4000  # bytes, for the message when a rank dies


class Rank:
    """Holds what the caller knows about one rank."""

    def __init__(self, number):
        self.number = number
        self.pid = self.status = self.failure = self.value = None
        self.ready = False
        self.noticed = 0.0  # the time at which its failure arrived
        self.inbox, self.stacks, self.errors = bytearray(), bytearray(), bytearray()
        self.ends = {}  # our ends of its control socket and of its pipes, by name


class Ranks:
    """Starts and watches the ranks of one launch, as a context. When it exits, no process is left.

    `payload` is the file that `worker.read_payload` reads, `listener` the bound socket that rank 0 takes over.
    """

    def __init__(self, world, payload, listener):
        self._world, self._ranks = world, [Rank(number) for number in range(world.size)]
        self._payload, self._listener = payload, listener
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
            sent += [self._payload] + [self._listener] * (rank.number == 0)
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

    def results(self, timeout):
        """Return what each rank returned, pickled, in rank order. RankError if one did not in `timeout` seconds."""
        started, limit, deadline = False, SECONDS_TO_START, time.monotonic() + SECONDS_TO_START
        while any(rank.value is None for rank in self._ranks):
            failed = [rank for rank in self._ranks if rank.failure]
            patience = [rank.noticed + (SECONDS_TO_EXPLAIN if rank.failure.consequence else SECONDS_TO_ARRIVE)
                        for rank in failed]
            if failed and min(patience) <= time.monotonic():
                raise blame([r.failure for r in failed], {r.number for r in failed if r.status is not None})
            if not failed and deadline <= time.monotonic():
                raise self._hung(limit)
            self._listen(min([deadline, *patience]))
            if not started and all(rank.ready for rank in self._ranks):
                started, limit, deadline = True, timeout, time.monotonic() + timeout
        self._leaving = True
        for rank in self._ranks:
            rank.ends["control"].shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        while any(rank.status is None for rank in self._ranks) and time.monotonic() < deadline:
            self._listen(deadline)
        return [rank.value for rank in self._ranks]

    def _hung(self, seconds):
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
        return hung(stacks, seconds, [rank.number for rank in self._ranks if rank.value is not None], self._world)

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
            rank.inbox += data
            self._note_messages(rank)
        elif name == "stacks":
            rank.stacks += data
        else:
            self._output.feed(rank.number, name, data)
            if name == "stderr":
                rank.errors = (rank.errors + data)[-STDERR_KEPT:]
        return bool(data)

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
        if over and not self._leaving:
            raise RuntimeError("the process that forks ranks has ended, and the ranks with it; the next launch starts "
                               f"another\n{last_words()}".rstrip())

    @staticmethod
    def _fail(rank, failure):
        rank.failure, rank.noticed = failure, time.monotonic()
