"""What the tests of every page's blanks share."""

from exercises_kit import graded_here, said  # noqa: F401
