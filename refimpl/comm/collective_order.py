"""Records which collectives each rank has begun, and in what order; and tells two orders apart.

Ranks match collectives by their order alone. A rank that leaves one out, or begins two the other way round, makes the
others wait for ever, or adds up tensors that do not belong together. So each communicator keeps the order of its own
collectives: a count, a hash of all of them, which two ranks compare at the cost of 16 bytes, and the last 64 as text.

An Order keeps all this in bytes, in a page of memory. `launch` gives pages that the caller can read, too: of a rank
that hangs, and of one that was killed.
"""

import hashlib
import struct
import threading
from collections import Counter
from functools import lru_cache

from ..ranks.errors import names

KEPT = 64  # collectives, as text
PLACES = KEPT + 8  # for texts: a rank may begin a few more while the caller copies its page
HEAD = struct.Struct("<5q88p")  # count, digest, ended, waiting, key, ranks
COUNT_AND_DIGEST, ENDED_AND_WAITING = struct.Struct("<2q"), struct.Struct("<2q")  # at 0 and at 16
TEXT = struct.Struct("128p")
PAGE = HEAD.size + PLACES * TEXT.size  # bytes of an Order
PRIME, BASE = 2**61 - 1, 0x1B873593CC9E2D51  # of the digest, a polynomial hash
SHOWN_BEFORE, SHOWN = 2, 4  # lines of the common past, and of what each rank did then


class Order:
    """Holds what this rank has begun in one communicator.

    - `count`: how many collectives, and `digest`: a hash of all of them, in order, that fits int64. Both are the same
      on two ranks if and only if (but for a chance of 10⁻¹⁸ for each collective) they began the same collectives in the
      same order, with the same shape, dtype, op, src and label. Messages from one rank to another are not in it.
    - `ended`: how many collectives and messages have ended.
    - `waiting`: the number of the collective that this rank waits for, else 0; below 0 of one that raised.
    - `key` and `ranks` tell which communicator it is.

    `page`: the memory to keep it in, of PAGE bytes. What it holds already is taken over.
    """

    def __init__(self, page=None):
        self._page = memoryview(bytearray(PAGE) if page is None else page)
        self.count, self.digest, self.ended, self.waiting, self.key, ranks = HEAD.unpack_from(self._page)
        self.ranks = ranks.decode(errors="replace")

    def name(self, key, ranks):
        """Note which communicator it is of; return the order. Once, before anything begins."""
        self.key, self.ranks = key, ranks
        HEAD.pack_into(self._page, 0, 0, 0, 0, 0, key, ranks.encode())
        return self

    def begin(self, collective, shape=None, dtype=None, op=None, src=None, label=""):
        """Record that a collective begins; return its number, from 1 on."""
        fingerprint, text = _entry(collective, shape, dtype, op, src, label)
        place = HEAD.size + self.count % PLACES * TEXT.size
        self._page[place:place + TEXT.size] = text
        self.count += 1
        self.digest = (self.digest * BASE + fingerprint) % PRIME
        COUNT_AND_DIGEST.pack_into(self._page, 0, self.count, self.digest)
        return self.count

    def wait(self, number):
        """Note that this rank now waits for collective `number`; 0: for none. While another thread than the main one
        waits, the rank does not."""
        if threading.get_ident() == threading.main_thread().ident:
            self.waiting = number
            ENDED_AND_WAITING.pack_into(self._page, 16, self.ended, number)

    def end(self):
        """Note that a collective, or a message, has ended, and with it the wait for it."""
        self.ended += 1
        if threading.get_ident() == threading.main_thread().ident:
            self.waiting = 0
        ENDED_AND_WAITING.pack_into(self._page, 16, self.ended, self.waiting)

    def until_end(self, number):
        """Return a context in which this rank waits for collective `number`. At its end that has ended, or raised."""
        return _UntilEnd(self, number)

    def describe(self, number):
        """Return one of the last 64 as text: "#12 all_gather of blocks.3, (1024,) float32"."""
        text, = TEXT.unpack_from(self._page, HEAD.size + (number - 1) % PLACES * TEXT.size)
        return f"#{number} {text.decode(errors='replace')}"

    @property
    def recent(self):
        """Return the last 64 as text, the oldest first."""
        return [self.describe(number) for number in range(max(1, self.count - KEPT + 1), self.count + 1)]


class _UntilEnd:
    def __init__(self, order, number):
        self._order, self._number = order, number

    def __enter__(self):
        self._order.wait(self._number)

    def __exit__(self, kind, *error):
        self._order.end() if kind is None else self._order.wait(-self._number)


@lru_cache(4096)  # a training step repeats the same calls
def _entry(collective, shape, dtype, op, src, label):
    """Return (fingerprint, text in TEXT.size bytes) of a collective."""
    parts = [label] if label else []
    parts += [f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"] if shape is not None else []
    parts += [f"op {op}"] if op else []
    parts += [f"from rank {src}"] if src is not None else []
    raw = (f"{collective} of {', '.join(parts)}" if parts else collective).encode()
    digest = hashlib.sha256(raw).digest()
    if len(raw) >= TEXT.size:
        raw = raw[:TEXT.size - 16] + f"… {digest.hex()[:8]}".encode()
    return 1 + int.from_bytes(digest[:8], "big") % (PRIME - 1), TEXT.pack(raw)


def difference(orders, missing=True):
    """Compare {rank: its `recent`}. Returns (text, ranks): both orders, and the ranks that differ from the majority.

    If there is no majority, they differ from the lowest rank. ("", []) if all orders are equal. `missing`: whether to
    have begun fewer is a difference, as it is where ranks have met; ranks that were stopped may be late.
    """
    began = {rank: {int(line[1:line.index(" ")]): line for line in orders[rank]} for rank in sorted(orders)}
    first = max((min(lines, default=1) for lines in began.values()), default=1)  # before it, some lines are not kept
    last = max((max(lines, default=0) for lines in began.values()), default=0)
    for number in range(first, last + 1):
        here = {rank: lines.get(number) for rank, lines in began.items() if missing or number in lines}
        if len(set(here.values())) > 1:
            return _tell(began, number, here, number == first > 1)
    return "", []


def _tell(began, number, here, older):
    """Return (text, ranks) of orders that differ from `number` on; here[rank] is what each began as that."""
    usual, count = Counter(here.values()).most_common(1)[0]
    if 2 * count <= len(here):
        usual = here[min(here)]
    differ = [rank for rank, line in here.items() if line != usual]
    rest = [rank for rank in here if rank not in differ]
    lines = [f"{names(differ)} began other collectives than {names(rest)}, from #{number} on"
             f"{', or before: older ones are not kept' if older else ''}:"]
    past = [began[rest[0]][n] for n in range(number - SHOWN_BEFORE, number) if n in began[rest[0]]]
    lines += ["  before that:", *[f"    {line}" for line in past]] if past and not older else []
    for line in dict.fromkeys(here.values()):
        alike = [rank for rank in here if here[rank] == line]
        lines += [f"  {names(alike)}:", *[f"    {each}" for each in _rest(began, alike, number)]]
    return "\n".join(lines), differ


def _rest(began, alike, number):
    """Return what these ranks began from `number` on, by the one that has begun most; a few lines."""
    lines = max((began[rank] for rank in alike), key=lambda lines: max(lines, default=0))
    shown = [lines[n] for n in range(number, number + SHOWN) if n in lines]
    late = max(lines, default=0)
    if not shown:
        return [f"nothing after #{late}" if late else "nothing"]
    return [*shown, f"… until #{late}" if late >= number + SHOWN else "nothing more"]
