"""What tests of the device by itself share: its library, of its sources alone."""

import subprocess
from pathlib import Path

import pytest

from refimpl.phantom import libraries

SOURCES = Path(libraries.__file__).with_name("device")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """libphantom.so of the sources alone."""
    out = tmp_path_factory.mktemp("device") / "libphantom.so"
    sources = map(str, SOURCES.glob("*.c"))
    subprocess.run(["cc", "-shared", *libraries.FLAGS, "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror",
                    *sources, "-o", str(out), "-lpthread", "-ldl"], check=True)
    return out
