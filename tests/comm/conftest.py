"""Nothing is left of any test's ranks."""

from nothing_left import nothing_is_left, own_temporary_folder, processes_left, warm

__all__ = ["nothing_is_left", "own_temporary_folder", "processes_left", "warm"]
