"""What a technique would save at a recorded peak: as spans of a RecordedTimeline, or the reason why nothing."""

from typing import NamedTuple

SURELY, LOOSE = 1.05, 1.3  # times what is saved: up to there a saving is exact, a bound is near
NEARLY = 0.97  # a saving that is as near to its bound is no bound
RETAINED = "graphs outlive their backward (retain_graph=True): when it would be dropped is not known"


class Found(NamedTuple):
    """The change to the timeline: [(first row, row after the last, ± bytes)].

    `bound`: why the bytes are a bound and no prediction; "" if what the technique saves, switched on, is within 5 %.
    `loose`: whether the bound may be more than 1.3 times what is saved.
    """

    spans: list
    bound: str = ""
    loose: bool = False


def or_retained(words):
    """Say why nothing is found: `words`, or that graphs are retained."""
    return lambda timeline: RETAINED if timeline.retained else words


class Help(NamedTuple):
    """What one technique would do here. `saves`: bytes of the peak, 0 with the reason in `why` if nothing; `page`: the
    number of its page."""

    name: str
    title: str
    saves: int
    bound: str
    why: str
    cost: str
    page: str
    call: str
    ranks: bool  # whether it takes several devices
    loose: bool = False  # whether the bound may be far above what is saved

    @property
    def words(self):
        """Return the saving as it is said: a bound says so."""
        return f"{'loosely ' if self.loose else ''}{'at most ' if self.bound else ''}{self.saves:,}"
