"""Ledger: bytes by category, an immutable mapping that prints itself.

Bytes are integers everywhere; MiB and GiB appear only in what a person reads.
"""

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from html import escape

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
INPUTS = "inputs"
COMMUNICATION = "communication"
TEMPORARIES = "temporaries"

# The order of rows in a table and of layers in a figure: what lives longest is at the bottom of the stack.
CATEGORIES = (PARAMETERS, BUFFERS, OPTIMIZER_STATE, GRADIENTS, INPUTS, ACTIVATIONS, COMMUNICATION, TEMPORARIES)


def human(nbytes: float) -> str:
    """Write `nbytes` for a person: `12 B`, `3.4 MiB`, `112.0 GiB` (binary units, one decimal)."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes:,} B" if unit == "B" else f"{size:,.1f} {unit}"


@functools.cache
def category_name(name):
    """Return the canonical spelling of a category: `optimizer_state` and `optimizer state` are one.

    Any name makes a category of its own, but for those that would stand unnoticed beside a known one: its short or
    singular form (`grads`, `parameter`) and a misspelling (`paramters`). ValueError names the one that was meant.
    """
    spelled = _spelled(name)
    lower = spelled.lower()
    stem = lower.removesuffix("s").removesuffix("y")
    meant = [c for c in CATEGORIES if len(stem) >= 3 and c.startswith(stem)]
    meant = meant or difflib.get_close_matches(lower, CATEGORIES, n=1, cutoff=0.9)
    if meant and spelled not in CATEGORIES:  # bytes under a misspelt name would be missed in sums
        raise ValueError(f"category {name!r}: is it {meant[0]!r}? If not, choose a name that is less like it")
    return spelled


def _spelled(name):
    return str(name).replace("_", " ")


def _whole(name, count):
    try:
        whole = int(count)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={count!r}: expected a number of bytes") from error
    if whole != count:
        raise ValueError(f"{name}={count!r}: expected a whole number of bytes")
    return whole


class Ledger(Mapping):
    """Map categories to bytes (int), with their `.total`.

    A category of `CATEGORIES` that holds nothing reads 0; any other unknown name raises KeyError. Ledgers add and
    subtract, with each other and with dicts, so that `t.peak - t.start` is what a step put on top of what was there.
    ValueError for a name that is nearly one of `CATEGORIES`, and for bytes that are no whole number.
    """

    def __init__(self, nbytes: Mapping[str, int] | Iterable[tuple[str, int]] = (), **more: int) -> None:
        given = {category_name(name): _whole(name, count) for name, count in {**dict(nbytes), **more}.items()}
        # in the order of rows; empty ones are left out
        known = {name: given[name] for name in CATEGORIES if given.get(name)}
        others = {name: count for name, count in given.items() if name not in CATEGORIES and count}
        self._bytes = {**known, **others}

    @property
    def total(self) -> int:
        """Return the bytes over all categories."""
        return sum(self._bytes.values())

    def __getitem__(self, name: str) -> int:
        name = _spelled(name)
        if name in self._bytes:
            return self._bytes[name]
        if name in CATEGORIES:
            return 0
        raise KeyError(f"no category {name!r} in this ledger; it has {', '.join(self._bytes) or 'none'}")

    def __contains__(self, name: object) -> bool:
        return _spelled(name) in self._bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def __eq__(self, other):
        return isinstance(other, Mapping) and self._bytes == {_spelled(name): n for name, n in other.items() if n}

    def __hash__(self):
        return hash(frozenset(self._bytes.items()))  # of equal ledgers equal, whatever the order of their rows

    def __add__(self, other):
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other):
        return self._plus(other, -1)

    def __rsub__(self, other):
        return Ledger(other) - self if isinstance(other, Mapping) else NotImplemented

    def _plus(self, other, sign):
        if not isinstance(other, Mapping):
            return NotImplemented
        other = Ledger(other)
        return Ledger({name: self._get(name) + sign * other._get(name) for name in (*self, *other)})

    def _get(self, name):
        return self._bytes.get(name, 0)

    def __repr__(self):
        return str(Table({"bytes": self}))

    def _repr_html_(self):
        return Table({"bytes": self})._repr_html_()


class Table:
    """Lay Ledgers side by side, one column each; with exactly two, a third column holds second minus first.

    Shows itself as a table in Jupyter and as aligned text in a terminal.
    """

    def __init__(self, columns):
        self.columns = {title: ledger if isinstance(ledger, Ledger) else Ledger(ledger)
                        for title, ledger in columns.items()}
        if not self.columns:
            raise ValueError("a table needs at least one ledger: beside(predicted=…, measured=…)")

    def rows(self):
        """Return (category, (bytes, …)) for each category that any column holds, and the total last."""
        held = dict.fromkeys(name for ledger in self.columns.values() for name in ledger)  # a set that keeps its order
        names = [c for c in CATEGORIES if c in held] + [name for name in held if name not in CATEGORIES]
        rows = [(name, [ledger._get(name) for ledger in self.columns.values()]) for name in names]
        rows.append(("total", [ledger.total for ledger in self.columns.values()]))
        return [(name, (*v, v[1] - v[0]) if len(v) == 2 else tuple(v)) for name, v in rows]

    def headers(self):
        """Return the column titles, the category's column excluded."""
        return [*self.columns, "difference"] if len(self.columns) == 2 else list(self.columns)

    def _cells(self):
        # One column has room for both spellings; several keep the exact bytes only.
        single = len(self.columns) == 1
        for name, values in self.rows():
            yield name, [f"{v:,}" for v in values] + ([human(values[0])] if single else [])

    def __str__(self):
        titles = ["", *self.headers()] + ([""] if len(self.columns) == 1 else [])
        lines = [titles] + [[name, *cells] for name, cells in self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        text = ["  ".join([line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)])
                for line in lines]
        return "\n".join(line.rstrip() for line in text)

    __repr__ = __str__

    def _repr_html_(self):
        titles = ["", *self.headers()] + ([""] if len(self.columns) == 1 else [])
        head = "".join(f"<th style='text-align:right'>{escape(title)}</th>" for title in titles)
        body = ""
        for name, cells in self._cells():
            tag = "th" if name == "total" else "td"
            cells = "".join(f"<{tag} style='text-align:right'>{escape(cell)}</{tag}>" for cell in cells)
            body += f"<tr><{tag} style='text-align:left'>{escape(name)}</{tag}>{cells}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def beside(**ledgers: "Ledger") -> "Table":
    """Lay ledgers side by side: `beside(predicted=…, measured=t.peak)`. Two ledgers get a column of differences.

    A tracker or trace stands for its peak.
    """
    return Table({title: getattr(ledger, "peak", ledger) for title, ledger in ledgers.items()})
