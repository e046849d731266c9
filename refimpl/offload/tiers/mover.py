"""Moves what a plan says: a thread for each link, so that a bucket leaves the device while another one comes.

A thread takes its moves in the order in which they were started, and begins one when those that it comes after have
ended. They were started before it, so somebody can always go on.
"""

import contextlib
import queue
import threading
import time
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..disk.buffer_pool import Buffer
from ..disk.flat import Flat, empty, fill
from ..disk.pace import Pace
from .bucket_moves import DEVICE, DISK, HOST

LINKS, STOP = ("out", "in", "disk"), None
NEWEST = 0.3  # weight of the newest reading of a rate


class Contents:
    """Host memory of one bucket, which is free when no move and no plan holds this."""

    data = None


class Mover:
    """Moves buckets between a device, host memory and a `Space` on a disk, or None.

    `links`: {"out": Link, "in": Link}, of `refimpl.comm`, to be as slow as they are. `failure`: the first error, after
    which contents are lost.
    """

    def __init__(self, space, links=None):
        self.space, self.failure, self._rates, self._waiting = space, None, {}, dict.fromkeys(LINKS, 0)
        paces = {link: Pace((links or {}).get(link)) for link in LINKS}
        self._queues = {link: queue.SimpleQueue() for link in LINKS}
        self._threads = [threading.Thread(target=_work, args=(jobs, paces[link]), daemon=True, name="tiered store")
                         for link, jobs in self._queues.items()]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, list(self._queues.values()), self._threads, space)

    def close(self):
        """Let what is under way end, and give the file up."""
        self._end()

    @staticmethod
    def now():
        """Return seconds of a clock."""
        return time.monotonic()

    def start(self, move):
        """Begin a move as soon as its link is free and those that it comes after have ended."""
        bucket = move.bucket
        if move.target == HOST:
            bucket.buffer = Contents()
        move.contents, move.done, move.error = bucket.buffer, threading.Event(), None
        move.tensors, move.mover = bucket.tensors, self
        cuda = next((tensor.device for tensor in bucket.tensors if tensor.is_cuda), None)
        move.stream = cuda and torch.cuda.current_stream(cuda)
        if any(isinstance(tensor, FakeTensor) for tensor in bucket.tensors):  # a dry run: of this thread alone
            if move.source == DEVICE:
                empty(move.tensors)
            elif move.target == DEVICE:
                fill(move.tensors)
            move.done.set()
        else:
            self._waiting[move.link] += move.nbytes
            self._queues[move.link].put(move)

    def wait(self, move):
        """Return when a move has ended. Raises what went wrong with it."""
        move.done.wait()
        if move.error is not None:
            raise move.error

    def seconds(self, link, nbytes):
        """Return how long a link takes, by the moves so far; 0 before the first."""
        return nbytes / self._rates[link] if link in self._rates else 0.0

    def backlog(self, link):
        """Return for how long a link has something to do."""
        return self.seconds(link, self._waiting[link])

    def reserve(self, bucket):
        """Give a bucket its place on the disk. StoreError if there is none."""
        self.space.allocate(bucket.key, bucket.nbytes)

    @staticmethod
    def free(bucket, tier):
        """Free what a bucket has in a tier."""
        if tier == DEVICE:
            empty(bucket.tensors)
        else:
            bucket.buffer = None

    def ended(self, move, seconds):
        """Note a move, and the rate of its link."""
        self._waiting[move.link] -= move.nbytes
        if move.error is not None:
            self.failure = self.failure or move.error
        elif move.nbytes:
            rate = move.nbytes / max(seconds, 1e-9)
            self._rates[move.link] = rate if move.link not in self._rates else (
                NEWEST * rate + (1 - NEWEST) * self._rates[move.link])
        move.done.set()


def _work(moves, pace):
    while (move := moves.get()) is not STOP:
        mover = move.mover
        begun = time.monotonic()
        try:
            for each in move.after:
                mover.wait(each)
            begun = time.monotonic()  # the wait for other moves says nothing of this link's rate
            with pace(move.nbytes), torch.cuda.stream(move.stream) if move.stream else contextlib.nullcontext():
                _copy(move, mover.space)
        except BaseException as error:  # whoever waits for the move raises it
            move.error = error
        # A move that others come after would keep all before it alive, and their tensors.
        move.after, move.contents, move.tensors, move.mover = [], None, None, None
        mover.ended(move, time.monotonic() - begun)
        del move, mover


def _copy(move, space):
    if move.target == DEVICE:
        fill(move.tensors)
    if move.target == HOST:
        contents = Buffer(move.bucket.host_bytes, pinned=move.stream is not None)
        Flat(move.tensors).copy_out(contents, 0)
        move.contents.data = contents
    elif move.target == DISK:
        whole = move.tensors if move.source == DEVICE else [move.contents.data.tensor[: move.bucket.nbytes]]
        space.write(move.bucket.key, whole).wait()
    elif move.source == HOST:
        Flat(move.tensors).copy_back(move.contents.data, 0)
    else:
        space.read(move.bucket.key, move.tensors).wait()
    if move.source == DEVICE:
        empty(move.tensors)


def _stop(queues, threads, space):
    for jobs in queues:
        jobs.put(STOP)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    if space is not None:
        space.close()
