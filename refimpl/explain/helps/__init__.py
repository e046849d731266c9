"""What would help here: every technique of the package, and the bytes that it would save at a recorded peak."""

from .catalogue import TECHNIQUES, Technique, helps
from .found import Found, Help

__all__ = ["TECHNIQUES", "Found", "Help", "Technique", "helps"]
