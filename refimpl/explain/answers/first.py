"""What to change first: what grows, then the plain answers, the line with most of the peak, and the best techniques."""

from collections import Counter, defaultdict

from ...common.ledger import ACTIVATIONS, INPUTS, TEMPORARIES
from .answer import Answer

MANY = 3
WORTH, LARGE = 0.05, 0.2  # shares of the peak: what is worth a sentence; what a line has that is one by itself


def first(explanation):
    """List the Answers that are said first: all that grows, and others up to three in all."""
    timeline = explanation.timeline
    found = [Answer("grows", each.nbytes, f"grows by {each.nbytes:,} bytes a step: {each}", each.lines, each.cure)
             for each in explanation.grows]
    least = WORTH * timeline.peak
    plain = [each for each in explanation.answers if each.saves >= least]
    said = {line for each in found + plain for line in each.lines}
    found += plain + [each for each in largest_line(timeline) if not said & set(each.lines)]
    found += [_of_technique(each) for each in sorted(explanation.helps, key=lambda each: (each.loose, -each.saves))
              if each.saves >= least and not each.ranks and each.name != "rows"]  # the last resort of micro-batches
    return found[: max(MANY, len(explanation.grows))]


def largest_line(timeline):
    """List an Answer for the line that made most of what is no state of the models, if that is much of the peak."""
    lines, sorts = Counter(), defaultdict(Counter)
    for i in timeline.alive(timeline.peak_row).tolist():
        record = timeline.records[i]
        if timeline.categories[i] in (ACTIVATIONS, TEMPORARIES, INPUTS) and record.line is not None:
            lines[record.line] += int(timeline.nbytes[i])
            sorts[record.line][record.op, record.dtype, record.shape] += int(timeline.nbytes[i])
    for line, nbytes in lines.most_common(1):
        if nbytes >= LARGE * timeline.peak:
            (op, dtype, shape), most = sorts[line].most_common(1)[0]
            what = (f"{nbytes:,} bytes, {nbytes / timeline.peak:.0%} of the peak, are made at {line}: "
                    f"{line.text.strip()}\n  {most:,} of them by {op}, {dtype} {tuple(shape)}")
            return [Answer("line", 0, what, (line,), "")]
    return []


def _of_technique(each):
    return Answer(each.name, each.saves, f"{each.title} would help: page {each.page}", (), f"`{each.call}`", each.bound)
