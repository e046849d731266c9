"""The exception that a caller of ranks can catch, and how messages name ranks."""

from collections.abc import Sequence


class RankError(RuntimeError):
    """Raised when ranks do not return: they raised, exited, were killed, hung, or returned an unpicklable value.

    `rank` is the first that failed, `ranks` all that are to blame. The message holds the first rank's own traceback,
    and `__cause__` is its exception, if it raised one that can be pickled.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    @property
    def rank(self) -> int | None:
        """Return the rank that failed first; None if it is not known."""
        return self.ranks[0] if self.ranks else None

    def __reduce__(self):
        return type(self), (*self.args, self.ranks)


def names(ranks):
    """Format ranks: "rank 1"; "ranks 0, 2 and 3"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
