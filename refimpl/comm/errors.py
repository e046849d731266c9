"""What a caller of `launch` can catch."""


class RankError(RuntimeError):
    """One or more ranks did not return: they raised, exited, were killed, hung, or returned what cannot travel.

    `rank` is the one that began it, `ranks` all that are to blame; the message holds that rank's own traceback.
    `__cause__` is its exception, where there was one and it could travel.
    """

    def __init__(self, message, ranks=()):
        super().__init__(message)
        self.ranks = tuple(ranks)

    @property
    def rank(self):
        """The rank that began it."""
        return self.ranks[0] if self.ranks else None

    def __reduce__(self):
        return type(self), (*self.args, self.ranks)


class CollectiveMismatch(RankError):
    """Debug mode: ranks met in a collective with different tensors, or met in different collectives.

    `ranks` are those that differ from most (from the lowest rank if no majority exists).
    """
