"""What became of the storages that autograd saved: bytes before and after, by kind, and what was left and why."""

import weakref
from html import escape
from typing import Any

from ..common.ledger import Ledger, beside, human


class Report:
    """Bytes of activations `.before` and `.after` (Ledgers by kind); kinds that begin with "left" say why.

    `.owned`: bytes that were saved but belong to the model or the caller, and are in neither. `.host`: bytes that went
    to host memory.
    """

    def __init__(self) -> None:
        self._rows, self._stored, self.owned, self.host = {}, weakref.WeakSet(), 0, 0

    def __getstate__(self):
        return {**vars(self), "_stored": ()}  # weak references cannot be copied; the figures can

    def add(self, kind: str, before: int, after: int, stored: Any = None) -> None:
        """Count one more storage of `before` bytes, of which `after` are kept."""
        row = self._rows.setdefault(kind, [0, 0, 0])
        for i, more in enumerate((1, before, after)):
            row[i] += more
        if stored is not None:
            self._stored.add(stored)

    @property
    def before(self) -> Ledger:
        """Return a Ledger: kind -> bytes that autograd would have kept."""
        return Ledger({kind: row[1] for kind, row in self._rows.items()})

    @property
    def after(self) -> Ledger:
        """Return a Ledger: kind -> bytes that are kept."""
        return Ledger({kind: row[2] for kind, row in self._rows.items()})

    @property
    def counts(self) -> dict[str, int]:
        """Return {kind: number of storages}."""
        return {kind: row[0] for kind, row in self._rows.items()}

    def held_elsewhere(self) -> list[tuple[int, str]]:
        """List [(bytes, what it was)] of the storages whose original is still alive beside its stored form, largest
        first: these saved nothing."""
        alive = [(stored.nbytes, stored.described) for stored in self._stored if not stored.original.expired()]
        return sorted(alive, reverse=True)

    def __str__(self):
        lines = [str(beside(before=self.before, after=self.after))]
        if self.owned:
            lines.append(f"not touched: {self.owned:,} bytes of parameters, buffers and inputs")
        if self.host:
            lines.append(f"in host memory: {self.host:,} bytes")
        held = self.held_elsewhere()
        if held:
            lines.append(f"saved nothing: {human(sum(n for n, _ in held))} of originals that somebody still holds, "
                         f"such as {held[0][1]}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        table, *notes = beside(before=self.before, after=self.after)._repr_html_(), *str(self).split("\n")
        first = len(str(beside(before=self.before, after=self.after)).split("\n"))
        return table + "".join(f"<p>{escape(note)}</p>" for note in notes[first:])
