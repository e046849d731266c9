"""Nothing is left of any test's hosts: no process, no mount, no interface."""

import socket
import time
from pathlib import Path

import psutil
import pytest
from hosts_kit import missing, zygote


def there():
    mounts = len(Path("/proc/mounts").read_text().splitlines())
    return {child.pid for child in psutil.Process().children(recursive=True)}, mounts, socket.if_nameindex()


@pytest.fixture(autouse=True)
def nothing_is_left():
    if missing():
        yield
        return
    zygote()
    before = there()
    yield
    until = time.monotonic() + 3  # who waits for a host's process in the zygote ends after it
    while there() != before and time.monotonic() < until:
        time.sleep(0.02)
    assert there() == before
