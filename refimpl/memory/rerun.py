"""A seam between techniques: what a function sees of its thread, beside its arguments, when it is run again later.

A technique that recomputes runs a function twice, the second time in backward, where a context of the first time has
ended. Techniques with such contexts register how to keep theirs; those that recompute ask for all of them. Neither has
to know the other.
"""

_keepers = []


def register(keep):
    """From now on `keep_state` applies `keep`: function -> the function that will see what it would see now.

    Gives `keep` back, so that it can stand as a decorator.
    """
    _keepers.append(keep)
    return keep


def keep_state(function):
    """`function`, which will see what it would see now of every registered context, whenever it runs."""
    for keep in _keepers:
        function = keep(function)
    return function
