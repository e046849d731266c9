"""A function in a thread of its own."""

from concurrent.futures import ThreadPoolExecutor


def in_a_thread(function, *args):
    """What it returns there; what it raises there is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()
