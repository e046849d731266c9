"""Raises on all ranks what one of them finds wrong with a saved state."""

from ..comm.texts import gather_results
from .manifest import SavedStateError


def validate_on_all(comm, check):
    """Call `check()` on each rank and return [its result on each rank]. If it raises SavedStateError on one rank, all
    ranks raise that."""
    def work():
        try:
            return None, check()
        except SavedStateError as error:
            return str(error), None
    answers = gather_results(comm, work)
    for error, _ in answers:
        if error:
            raise SavedStateError(error)
    return [answer for _, answer in answers]
