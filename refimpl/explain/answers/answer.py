"""One plain answer, and all of them."""

from typing import NamedTuple

SHOWN = 0.01  # share of the peak


class Answer(NamedTuple):
    """What takes bytes, in a sentence, the lines that make it, and the `change` that saves `saves` bytes of the peak.

    `bound`: why the bytes are a bound and no prediction, "" if they are one, as in Found.
    """

    name: str
    saves: int
    what: str
    lines: tuple
    change: str
    bound: str = ""

    @property
    def advice(self):
        """Return the change and what it saves, in words; "" if there is none."""
        saved = f"{'at most ' if self.bound else ''}{self.saves:,} bytes{f' ({self.bound})' if self.bound else ''}"
        return self.change and (self.change if self.name == "grows" else f"{self.change}: saves {saved}")

    def __str__(self):
        return "\n  ".join(filter(None, (self.what, self.advice)))


def answers(timeline):
    """List the Answers of a RecordedTimeline that save a hundredth of its peak or more, those that save most first."""
    from . import dead, foreach, masks, models, predictions, sparse  # noqa: PLC0415

    found = [each for rule in (dead.dead, foreach.foreach, sparse.sparse, masks.masks, predictions.predictions,
                               models.models) for each in rule(timeline)]
    return sorted((each for each in found if each.saves >= SHOWN * timeline.peak), key=lambda each: -each.saves)
