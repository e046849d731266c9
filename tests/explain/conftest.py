"""A script runs as `__main__` in this process; afterwards that is again what it was."""

import sys

import pytest


@pytest.fixture(autouse=True)
def main_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
