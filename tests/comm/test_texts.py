"""Texts, results and exceptions of each rank come to all ranks."""

from rank_pool import on_ranks

from refimpl.comm import RankError, launch
from refimpl.comm.texts import broadcast_text, gather_results


def outcome(function, *args):
    """What it returns, or its exception's type, ranks and text."""
    try:
        return function(*args)
    except (RankError, OSError, KeyError) as error:
        return type(error), getattr(error, "ranks", None), str(error)


@on_ranks(3, launch=launch)
def test_results_and_exceptions_come_to_all(comm):
    def work(fails):
        if comm.rank in fails:
            raise KeyError(f"no é on {comm.rank}") if comm.rank else OSError("disk full")
        return {"rank": comm.rank, "text": "ü" * 10 * comm.rank}

    assert broadcast_text(comm, "from rank 0: é" if comm.rank == 0 else "ignored") == "from rank 0: é"
    assert broadcast_text(comm, "") == "" and gather_results(comm, lambda: None) == [None] * 3
    answers, one, two = (outcome(gather_results, comm, lambda f=f: work(f)) for f in ((), [1], [0, 2]))
    assert answers == [{"rank": r, "text": "ü" * 10 * r} for r in range(3)]  # of any length, in any script
    assert one == ((KeyError, None, "'no é on 1'") if comm.rank == 1 else
                   (RankError, (1,), "rank 1 raised KeyError: 'no é on 1'"))
    assert two == {0: (OSError, None, "disk full"), 1: (RankError, (0, 2), "rank 0 raised OSError: disk full; "
                   "rank 2 raised KeyError: 'no é on 2'"), 2: (KeyError, None, "'no é on 2'")}[comm.rank]
