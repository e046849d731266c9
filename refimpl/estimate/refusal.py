"""Errors of a program that is run dry, with the line on which they were."""

import re
from pathlib import Path

from ..memory.fakes.program_lines import of_the_program, raised


def refusal(error):
    """Return the ValueError that says on which line a program's own error was; None if `error` says what is needed."""
    places = raised(error)
    ours = places and places[0].path.startswith(str(Path(__file__).parents[1]))
    if isinstance(error, ValueError) and (ours or re.match(r"\S+\.py:\d+: ", str(error))):
        return None
    place = of_the_program(places)
    return ValueError(f"{place}: `{place.expression}` raises {type(error).__name__} in a dry run: {error}")
