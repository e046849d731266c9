"""The library's lines below a line of the user's that has most of a peak, as `trainer.train()` has."""

from collections import Counter

MOST = 0.5  # share of the peak from which on a line says too little


def lines_below(storages):
    """Return (the line, [(a library's line that it came to, bytes), …]) of the Held of a peak; None, [] if none has
    over half of it, or no library is below."""
    lines = Counter()
    for each in storages:
        lines[each.line] += each.nbytes
    for line, nbytes in lines.most_common(1):
        if line is not None and nbytes > MOST * lines.total():
            below = Counter()
            for each in storages:
                if each.line == line and each.source not in (line, None):
                    below[each.source] += each.nbytes
            return (line, below.most_common()) if below else (None, [])
    return None, []
