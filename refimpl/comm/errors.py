"""The exceptions that a caller of `launch` can catch."""

from ..ranks import RankError


class CollectiveMismatch(RankError):
    """Raised in debug mode when ranks call different collectives, or one collective with tensors that do not match.

    `ranks` are those that differ from the majority (from the lowest rank if there is no majority).
    """
