"""From what all ranks have left in the store to who is to blame.

Each rank reads the same notes, so each comes to the same verdict; the first one that is written counts.
"""

from ...ranks.errors import RankError
from ..errors import CollectiveMismatch
from ..hang_diagnosis import deadlock, deserted, mismatch
from .notes import ReportedFailure

SILENT = 30.0  # seconds without a word after which a rank counts as gone
DEAD = 2.0  # seconds without a word, of a rank to which connections have broken
SETTLED = 1.0  # seconds for which a rank has waited, before its record is looked at
TERMINATED = "SIGTERM"  # the kind of a failure
KINDS = {"RankError": RankError, "CollectiveMismatch": CollectiveMismatch}


def first_written(notes):
    """Return the failure to report, of those that ranks wrote, or None. One that is no consequence goes before others;
    then one whose rank knew of no other; then that of the lowest rank."""
    found = [note.failure for note in notes if note.failure]
    return min(found, key=lambda each: (each.consequence, not each.first, each.ranks), default=None)


def other_failures(failure, notes):
    """Return the first lines of what other ranks wrote before they knew of a failure."""
    found = {note.failure.text.splitlines()[0]: None for note in notes
             if note.failure and note.failure.first and not note.failure.consequence and note.failure != failure}
    return [line for line in found if line != failure.text.splitlines()[0]]


def went_silent(others, hosts):
    """Return the ReportedFailure for ranks that have written nothing for SILENT seconds, or None."""
    gone = [rank for rank, note in enumerate(others.notes) if others.silent(rank) > SILENT and not note.failure]
    if not gone:
        return None
    longest = max(others.silent(rank) for rank in gone)
    whole = [host for host, ranks in hosts.groups().items() if set(ranks) <= set(gone)]
    what = (f"{hosts.format_ranks(gone)} {'has' if len(gone) == 1 else 'have'} not been heard of for {longest:.0f} s")
    what += f": {', '.join(whole)} is down or cut off, or " if hosts.several and whole else ": "
    what += "its process is stopped" if len(gone) == 1 else "their processes are stopped"
    return ReportedFailure(what + f" (SIGSTOP, a debugger, swap).{_others_wait(others, hosts, gone)}", gone)


def ended_silently(others, hosts):
    """Return the ReportedFailure for ranks that have ended without a word, since connections have broken; or None."""
    gone = [rank for rank, note in enumerate(others.notes)
            if others.silent(rank) > DEAD and not note.failure and not note.returned]
    if not gone:
        return None
    longest = max(others.silent(rank) for rank in gone)
    return ReportedFailure(f"{hosts.format_ranks(gone)} ended without a word, {longest:.0f} s ago: killed, perhaps "
                           f"since memory ran out (`dmesg` on {', '.join(hosts.groups(gone))} says so), or aborted in "
                           f"C++ code (its own output says so).{_others_wait(others, hosts, gone)}", gone)


def no_progress(others, hosts, timeout, records):
    """Return the ReportedFailure for ranks none of which has gone on for `timeout` seconds, or None."""
    if any(note.quiet + others.silent(rank) < max(timeout, note.patience) for rank, note in enumerate(others.notes)
           if not note.returned):
        return None
    running = [rank for rank, note in enumerate(others.notes) if not note.returned]
    elsewhere = [rank for rank in running if not others.notes[rank].doing]
    text = f"no rank computed or ended a collective for {timeout:g} s: "
    text += "; ".join(f"{hosts.format_ranks([rank])} has been outside of collectives for "
                      f"{others.notes[rank].since:.0f} s" for rank in elsewhere)
    text += _others_wait(others, hosts, elsewhere, "; " if elsewhere else "")
    blamed = elsewhere or running
    trace = "\n".join(f"where rank {rank} was:\n{others.notes[rank].at}" for rank in blamed if others.notes[rank].at)
    if why := mismatched(records):
        return ReportedFailure(f"{why.text}\n\n{text}", why.ranks, why.kind, trace)
    return ReportedFailure(text, blamed, trace=trace)


def stuck(notes, records, hosts):
    """Return the ReportedFailure for ranks that wait for what will never come: for a rank that has returned, or for
    each other; None as long as that cannot be known. `records`: of those that have told theirs as it is now, else
    blank."""
    returned = [rank for rank, note in enumerate(notes) if note.returned]
    error = deserted(records, returned) if returned else None
    if error is None and all(note.doing and note.quiet > SETTLED for note in notes):
        error = deadlock(records)
    return error and ReportedFailure(str(error), list(error.ranks), type(error).__name__)


def mismatched(records):
    """Return the ReportedFailure of ranks that began different collectives, or None."""
    error = mismatch(records)
    return error and ReportedFailure(str(error), list(error.ranks), "CollectiveMismatch")


def _others_wait(others, hosts, gone, before=" "):
    """Say what the others wait in."""
    places = {}
    for rank, note in enumerate(others.notes):
        if note.doing and rank not in gone:
            places.setdefault(note.doing, []).append(rank)
    told = [f"{hosts.format_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {place}" for place, ranks in places.items()]
    returned = [rank for rank, note in enumerate(others.notes) if note.returned]
    told += [f"{hosts.format_ranks(returned)} had returned"] if returned else []
    return before + "; ".join(told) if told else ""


def error_of(failure, hosts, rank, doing=""):
    """Return the exception that rank `rank` raises for a failure, with what it waited in."""
    text = hosts.in_text(failure.text)
    text += f"\n{hosts.format_ranks([rank])} waited in {doing}" if doing and rank not in failure.ranks else ""
    text += f"\n\n{failure.trace}" if failure.trace else ""
    return KINDS.get(failure.kind, RankError)(text, failure.ranks)
