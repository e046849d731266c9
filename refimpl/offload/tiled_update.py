"""One bucket's update on the host, tile by tile: the weights of a tile are on their way while the next is computed."""

from typing import NamedTuple

from .adamw_kernels import Hyper


class UpdateRange(NamedTuple):
    """Elements first … end − 1 of a host's part that one step of AdamW updates alike; `hyper` None: not at all."""

    first: int
    end: int
    hyper: Hyper | None


def merged(pieces):
    """Return UpdateRanges of [(its number in the bucket, Piece, Hyper)]. Neighbours that are updated alike are one: the
    padding between them is 0, and AdamW leaves it so."""
    runs, before = [], None
    for number, piece, hyper in pieces:
        end = piece.place + piece.end - piece.first
        if runs and before == number - 1 and runs[-1].hyper == hyper:
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(UpdateRange(piece.place, end, hyper))
        before = number
    return runs


def within(runs, first, end):
    """Yield UpdateRanges that cover first … end − 1, with those between them that nothing updates."""
    for run in runs:
        begin, last = max(run.first, first), min(run.end, end)
        if begin >= last:
            continue
        if first < begin:
            yield UpdateRange(first, begin, None)
        yield UpdateRange(begin, last, run.hyper)
        first = last
    if first < end:
        yield UpdateRange(first, end, None)


def update_tiles(part, runs, shard, kernel, link):
    """Update a HostPart and begin to copy all of its weights into the shard; return the Copies."""
    copies, (mean, square) = [], part.moments
    for first in range(0, part.n, link.sub_group_size):
        end = min(first + link.sub_group_size, part.n)
        tile = link.tile(shard.dtype, shard.device)
        for begin, last, hyper in within(runs, first, end):
            here, weights = slice(begin, last), tile[begin - first : last - first]
            if hyper is None:
                weights.copy_(part.master[here])
            else:
                kernel.update(part.master[here], mean[here], square[here], part.gradient[here], weights, hyper)
        copies.append(link.send(shard[first:end], tile, part.name))
    return copies
