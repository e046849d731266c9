"""The plain answers: what takes bytes that need not be there, the line to change, and how."""

from .answer import Answer, answers
from .first import first

__all__ = ["Answer", "answers", "first"]
