"""Finds why ranks hang, or who waits for a rank that has returned too early, from the orders of their collectives.

A rank keeps the order of each of its communicators on a page of its record, which the caller can read (`ranks.signs`).
"""

from ..ranks.errors import RankError, names
from .collective_order import PAGE, Order, difference
from .errors import CollectiveMismatch

SHOWN = 4  # collectives of one rank
ADVICE = "every rank calls every collective: let all end together, for example when the first has no batch left"


def pages(record):
    """Cut a rank's record into pages, one for each of its first 14 communicators; the orders of others stay with it."""
    view = memoryview(record)
    return [view[begin:begin + PAGE] for begin in range(0, len(view) - PAGE + 1, PAGE)]


def orders(record):
    """Return {key: Order} of a rank's communicators."""
    return {order.key: order for order in map(Order, pages(record)) if order.key}


def mismatch(records):
    """Return the CollectiveMismatch of ranks that began different collectives as number n of a communicator, or None.

    A rank that has begun fewer is one of them if all ranks wait in some collective: else it may only be late.
    """
    read = [orders(record) for record in records]
    all_wait = all(any(order.waiting > 0 for order in each.values()) for each in read)
    for missing in (False, True) if all_wait else (False,):
        for key in dict.fromkeys(key for each in read for key in each):
            known = {rank: each[key] for rank, each in enumerate(read) if key in each}
            text, ranks = difference({rank: order.recent for rank, order in known.items()}, missing)
            if ranks:
                return CollectiveMismatch(_among(next(iter(known.values())).ranks, len(records)) + text, ranks)
    return None


def deadlock(records):
    """Return the CollectiveMismatch of ranks that all wait, each in a collective that another one has not begun; else
    None."""
    read = [orders(record) for record in records]

    def in_vain(rank):
        return any(order.waiting > 0 and any(key in each and each[key].count < order.waiting for each in read)
                   for key, order in read[rank].items())

    return mismatch(records) if all(map(in_vain, range(len(read)))) else None


def deserted(records, returned):
    """Return the RankError for ranks that wait for one of `returned` in a collective that it has not begun, or None."""
    read = [orders(record) for record in records]
    told, gone = [], set()
    for key in dict.fromkeys(key for each in read for key in each):
        waits = {rank: each[key] for rank, each in enumerate(read)
                 if rank not in returned and key in each and each[key].waiting > 0}
        for number in sorted({order.waiting for order in waits.values()}):
            away = [rank for rank in returned if key in read[rank] and read[rank][key].count < number]
            here = [rank for rank, order in waits.items() if order.waiting == number]
            if away:
                gone.update(away)
                told += [_desertion(away, here, read[away[0]][key].count, waits[here[0]], number, len(records))]
    return RankError("\n".join(told) + f"\n{ADVICE}", sorted(gone)) if told else None


def _desertion(away, here, count, order, number, world_size):
    return (f"{_among(order.ranks, world_size)}{names(away)} returned after {count} collective{'s' * (count != 1)}; "
            f"{names(here)} wait{'s' * (len(here) == 1)} for {'it' if len(away) == 1 else 'them'} in "
            f"{_collective(order, number)}")


def _collective(order, number):
    return f"{order.describe(number).partition(' ')[2]} (#{number})"


def waits(records):
    """Return {rank: the collective that it waits in, its number, and its group if that is not the world}."""
    return {rank: told for rank, record in enumerate(records) if (told := waits_in(record, len(records)))}


def waits_in(record, world_size):
    """Return the collective that a rank waits in, of one record; "" for none."""
    found = ""
    for order in orders(record).values():
        if order.waiting > 0:
            group = "" if order.ranks == names(range(world_size)) else f" of the group of {order.ranks}"
            found = _collective(order, order.waiting) + group
    return found


def _among(group, world_size):
    """Return how a sentence about a communicator of fewer ranks than the world begins."""
    return "" if group == names(range(world_size)) else f"in the group of {group}: "


def last_collectives(record):
    """Describe the last collectives that one rank began, for an error of that rank alone."""
    lines = []
    for order in orders(record).values():
        if order.count:
            lines += [f"the last collectives that this rank began with {order.ranks} ({order.count} in all):"]
            lines += [f"  {line}" for line in order.recent[-SHOWN:]]
            lines += [f"  it waited in #{abs(order.waiting)}"] if order.waiting else []
    return "\n".join(lines)
