"""The exceptions that a caller of `launch` can catch."""

from ..ranks.errors import RankError


class CollectiveMismatch(RankError):
    """Raised when ranks begin different collectives, or one collective with tensors that do not match.

    Debug mode finds out before they begin; without it, it is why they hang, or why their connections broke.
    `ranks` are those that differ from the majority (from the lowest rank if there is no majority).
    """
