"""One plain answer: what takes bytes that need not be there, and the change that takes them away."""

from collections import Counter
from typing import NamedTuple


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
    def advice(self) -> str:
        """Return the change and what it saves, in words; "" if there is none."""
        saved = f"{'at most ' if self.bound else ''}{self.saves:,} bytes{f' ({self.bound})' if self.bound else ''}"
        return self.change and (self.change if self.name == "grows" else f"{self.change}: saves {saved}")

    def __str__(self):
        return "\n  ".join(filter(None, (self.what, self.advice)))


def about(timeline, name, numbers, what, change, bound="", spans=None):
    """List an Answer about the storages `numbers`, if any is there at the peak: `change` adds `spans` to the timeline,
    by default that they are never there. In `what` {at} is where most of them were made."""
    there = [i for i in numbers if timeline.born[i] <= timeline.peak_row < timeline.freed[i]]
    if not there:
        return []
    lines, nbytes = Counter(), sum(int(timeline.nbytes[i]) for i in there)
    for i in there:
        lines[timeline.records[i].line] += int(timeline.nbytes[i])
    made = tuple(line for line, _ in lines.most_common(3) if line is not None)
    words = f"{nbytes:,} bytes {what.format(at=f'made at {made[0]}' if made else 'made by no line of the script')}"
    whole = [timeline.whole(i) for i in numbers] if spans is None else spans
    return [Answer(name, timeline.saved(whole), words, made, change, bound)]
