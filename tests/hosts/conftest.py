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
    until = time.monotonic() + 2
    while there() != before and time.monotonic() < until:  # who has told how a rank ended ends some ms later
        time.sleep(0.01)
    assert there() == before
