"""Prints names that came from a file, so that a terminal shows them and does not obey them; reads sizes."""

import argparse
import json
import re
import reprlib
import sys

# C0 but for newline and tab, DEL, C1, and what turns the direction of writing.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ENDS = re.compile("[\t\n\u2028\u2029]")  # what begins another line or column, in a name

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 120, 60, 120


def visible(text):
    """Write control characters as `\\x1b` and `\\u202e`; newline and tab stay."""
    return CONTROL.sub(_written, text)


def one_line(text):
    """Write a name as one line: newline and tab, too, as `\\n` and `\\t`."""
    return CONTROL.sub(_written, ENDS.sub(_written, str(text)))


def _written(found):
    return found[0].encode("unicode_escape").decode()


def shown(value):
    """Return the `repr` of a value from a file, short whatever it holds."""
    return _SHORT.repr(value)


def print_text(text="", file=None, flush=False):
    """Print text that has names from elsewhere in it: control characters are visible, and a letter that `file` does not
    have is written as `\\u2192`. `file`: default stdout, as it is now."""
    print_raw(visible(str(text)), file, flush)


def print_raw(text, file=None, flush=False, end="\n"):
    """Print text of the user's own program, whose control characters may be colours."""
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=flush, end=end)


def print_json(found):
    """Print lists, dicts, strings and numbers as JSON in ASCII."""
    print(json.dumps(found, indent=2).replace("\x7f", "\\u007f"))


def refuse(parser, error):
    """End a command with one line that says why, and status 2. `parser`: the argparse parser of the command."""
    print_text(f"{parser.prog}: error: {short(one_line(error))}", file=sys.stderr)
    sys.exit(2)


def short(text, most=2000):
    """Leave out the middle of a long text."""
    return text if len(text) <= most else f"{text[:most // 2]} … {text[-most // 2:]}"


def size(text):
    """Read "24GiB", "512MiB" or bytes. argparse's ArgumentTypeError for anything else, and for less than a byte."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        nbytes = int(float(text.removesuffix(unit)) * UNITS[unit]) if unit else int(text)
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"invalid size value: {text!r}: expected 24GiB, 512MiB, 64KiB or a number of "
                                         "bytes")
    return nbytes
