"""What to change first: what grows, the plain answers, the lines with most of the peak, the best techniques."""

from collections import Counter, defaultdict

from ...common.ledger import ACTIVATIONS, INPUTS, TEMPORARIES
from .answer import Answer

MANY = 3
LATER = "resolution", "replica"  # another result, or another way to start it: behind the lines that make most
WORTH, LARGE = 0.05, 0.2  # shares of the peak: what is worth a sentence; what a line has that is one by itself


def first(explanation):
    """List the Answers that are said first: all that grows, and others up to three in all."""
    timeline = explanation.timeline
    found = [Answer("grows", each.nbytes, f"grows by {each.nbytes:,} bytes a step: {each}", each.lines, each.cure)
             for each in explanation.grows]
    least = WORTH * timeline.peak
    large = [each for each in explanation.answers if each.saves >= least]
    plain = [each for each in large if each.name not in LATER]
    said = {line for each in found + plain for line in each.lines}
    found += plain + [each for each in largest_lines(timeline) if not said & set(each.lines)]
    found += [each for each in large if each not in plain]
    found += [_of_technique(each) for each in sorted(explanation.helps, key=lambda each: (each.loose, -each.saves))
              if each.saves >= least and not each.ranks and each.name != "rows"]  # the last resort of micro-batches
    return found[: max(MANY, len(explanation.grows))]


def together(rows):
    """Return {what takes bytes: the changes that are advised}: what two Answers say of one thing is said once."""
    found = defaultdict(list)
    for each in rows:
        found[each.what].append(each.advice)
    return found


def largest_lines(timeline):
    """List an Answer for each of two lines, if it made much of the peak, states of the models apart."""
    lines, sorts = Counter(), defaultdict(Counter)
    for i in timeline.alive(timeline.peak_row).tolist():
        record = timeline.records[i]
        if timeline.categories[i] in (ACTIVATIONS, TEMPORARIES, INPUTS) and record.line is not None:
            lines[record.line] += int(timeline.nbytes[i])
            sorts[record.line][record.op, record.dtype, record.shape] += int(timeline.nbytes[i])
    return [_line(timeline, line, nbytes, *sorts[line].most_common(1)[0]) for line, nbytes in lines.most_common(2)
            if nbytes >= LARGE * timeline.peak]


def _line(timeline, line, nbytes, sort, most):
    op, dtype, shape = sort
    what = (f"{nbytes:,} bytes, {nbytes / timeline.peak:.0%} of the peak, are made at {line}: {line.text.strip()}\n"
            f"  {most:,} of them by {op}, {dtype} {tuple(shape)}")
    return Answer("line", 0, what, (line,), "")


def _of_technique(each):
    return Answer(each.name, each.saves, f"{each.title} would help: page {each.page}", (), f"`{each.call}`", each.bound)
