"""Files with one bad value in one field, and what may come of reading them: one line that refuses, and nothing else."""

import contextlib
import io
import json
import pickle
import random
import re
import time
import tracemalloc
from pathlib import Path

import tiers

from refimpl import cli

HOLE = "@hole@"
MISSING = object()
DEEP, LONG = 10**5, 10**8
MARKUP, CONTROL = "<img src=x onerror=alert(1)>", "a\x1b[2J\x9b31m\u202eb\x7f\nforged: 3 bytes\tc"
BAD = ("missing", "another type", "negative", "NaN", "2^63", "nested", "10^8 letters", "markup", "control")
TEXTS = ("missing", "markup", "control")  # of a name, which may be any text
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def ten_of(*columns):
    """Ten cases of a table, others with each commit: what a push runs of it. The whole table is held against the clock,
    so that each night runs all of it."""
    cases = [[]]
    for column in columns:
        cases = [[*case, value] for case in cases for value in column]
    return random.Random(tiers.commits(Path(__file__).parent)).sample(cases, 10)


def as_text(bad, another="[1.5]", nan="NaN", quoted=json.dumps):
    """A bad value in JSON or TOML."""
    if bad in ("nested", "10^8 letters"):
        return "[" * DEEP + "]" * DEEP if bad == "nested" else quoted("x" * LONG)
    return {"another type": another, "negative": "-1", "NaN": nan, "2^63": str(2**63), "markup": quoted(MARKUP),
            "control": quoted(CONTROL)}[bad]


def as_pickle(bad, another):
    """The opcodes of a bad value."""
    if bad == "nested":
        return b"]" * DEEP + b"a" * (DEEP - 1)
    if bad == "10^8 letters":
        return b"X" + LONG.to_bytes(4, "little") + b"x" * LONG
    value = {"another type": another, "negative": -1, "NaN": float("nan"), "2^63": 2**63, "markup": MARKUP,
             "control": CONTROL}[bad]
    return pickle.dumps(value, 2)[2:-1]


def with_hole(found, place, bad):
    """Put HOLE in a place of lists and dicts, a tuple of keys; or nothing, if `bad` is "missing"."""
    *way, last = place
    for key in way:
        found = found[key]
    if bad == "missing":
        del found[last]
    else:
        found[last] = HOLE
    return found


def pickled(found, bad, another):
    """A pickle with the bad value for HOLE."""
    data = pickle.dumps(found, 2)
    hole = b"X" + len(HOLE).to_bytes(4, "little") + HOLE.encode()
    assert bad == "missing" or data.count(hole) == 1
    return data if bad == "missing" else data.replace(hole, as_pickle(bad, another))


def refused(call, folder):
    """Call, and return the words of the one error; None if there was none. It is held that it took 2 s of a processor
    and 200 MB at most, and changed no file in the folder."""
    before = contents(folder)
    tracemalloc.start()
    began = time.process_time()
    try:
        words = call()
        seconds, nbytes = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words is None or (seconds < 2 and nbytes < 200e6), (seconds, nbytes)
    assert words is None or (len(words) < 3000 and len(words.splitlines()) == 1 and not RAW.search(words)), words
    assert contents(folder) == before
    return words


def contents(folder):
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def command(*arguments):
    """Run a command: what it refuses with; None if it does not, and then nothing that it says moves a cursor."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([*map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
    if status == 2:
        assert not out.getvalue()
        return err.getvalue()
    assert not status and not RAW.search(out.getvalue() + err.getvalue()), (status, out.getvalue(), err.getvalue())
    assert not any(line.startswith("forged") for line in out.getvalue().splitlines())
    return None
