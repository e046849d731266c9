"""A check of keyword options, for all techniques that take `**options`."""


def check_options(options, known, owner):
    """Raise TypeError for the first of `options` whose name is not in `known`; the message lists the known names.

    `owner`: the name of the class or function that was called.
    """
    for name in options:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r}: expected {', '.join(known) or 'none'}")
