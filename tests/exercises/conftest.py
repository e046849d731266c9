"""What the tests of every page's exercises share."""

from exercises_kit import graded_here, said  # noqa: F401
