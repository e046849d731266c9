"""Reads a pickle of dicts, lists, pairs of numbers, text and numbers, and nothing else.

Python's own unpickler runs what a file asks for. Without that it still gives memory by the file's word: 4 GiB for an
index of five bytes, or for a text that is said to be so long. It hashes a key that is a tuple of tuples, each twice in
the next, for ever. So the opcodes are read first, and the unpickler gets those alone that can do no such thing:

- a text has at most `TEXT` bytes, a frame less than 16 MiB;
- an index is smaller than the bytes before it;
- a tuple is a pair of numbers;
- there are not many more lists and dicts than a snapshot has for its bytes.

Opcodes are those of protocols 2 to 5 that `pickle.dump` writes for such data. See Python's pickletools.
"""

import io
import pickle
import re

TEXT = 2**20
DENSE = 8  # bytes for each list and dict; PyTorch's snapshots have 25 and more

_NUMBER = b"(?:K.|M..|J.{4}|\x8a(?:%b)|G.{8}|[N\x88\x89])" % b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(10))
_SHORT_TEXT = b"\x8c(?:%b)" % b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(24))
_FRAME = b"\x95.{3}\0{5}"  # one may begin anywhere
_PLAIN = re.compile(b"(?:[hq].|[\x94()}\\]usea]|j.{4}|%b(?:(?:%b)?%b(?:%b)?\x86)?|%b|%b|\x80.)++" % (
    _NUMBER, _FRAME, _NUMBER, _FRAME, _SHORT_TEXT, _FRAME), re.DOTALL)
_WIDTH = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"r": 4}  # bytes of the number that follows: a text's length, or an index
_LAST = (b".", b"c", b"\x93")  # its end; and what `find_class` refuses


def load(data):
    """Return what a pickle holds. UnpicklingError, with the place, if it is of another kind; errors of other classes,
    as EOFError and IndexError, if it is damaged."""
    # before a byte is read: lists cost more than they take in the file
    if DENSE * (data.count(b"]") + data.count(b"}")) > len(data) + DENSE * 1000:
        raise pickle.UnpicklingError("it has more lists and dicts than a snapshot of its size")
    at = 0
    while (code := data[at:at + 1]) not in _LAST:
        plain = _PLAIN.match(data, at)
        at = plain.end() if plain else _after(code, data, at)
    return _Data(io.BytesIO(data)).load()


def _after(code, data, at):
    """Return where the opcode behind a text or an index is."""
    if code not in _WIDTH:
        raise pickle.UnpicklingError(f"it has {code!r} at byte {at:,}, and a snapshot is made of dicts, lists and "
                                     "numbers" if code else "it ends before its end")
    end = at + 1 + _WIDTH[code]
    number, limit = int.from_bytes(data[at + 1:end], "little"), at if code == b"r" else TEXT
    if number > limit:
        what = "keeps a value under index" if code == b"r" else "has a text of so many bytes:"
        raise pickle.UnpicklingError(f"it {what} {number:,} at byte {at:,}, expected at most {limit:,}")
    return end if code == b"r" else end + number


class _Data(pickle.Unpickler):
    """Refuses what a file asks for."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot is made of dicts, lists and numbers")
