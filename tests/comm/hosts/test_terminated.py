"""A rank that is ended by SIGTERM has the time for a word, and ends as by default."""

import signal
import socket
import subprocess
import sys
import threading

from refimpl.comm.hosts.terminated import Terminated

ENDS = """
import threading, time
from refimpl.comm.hosts import terminated
def look():
    while not found.wait(0.5):
        pass
    print("a word", flush=True)
    terminated.end()
found = terminated.Terminated()
threading.Thread(target=look, daemon=True).start()
print("ready", flush=True)
import torch.distributed as dist  # the main thread waits where no handler of Python's runs
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.get("what nobody sets")
"""


def test_it_says_so_and_ends():
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "a word\n" and process.wait(20) == -signal.SIGTERM


def test_what_handles_sigterm_stays():
    before = signal.getsignal(signal.SIGTERM)
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        found = Terminated()
        assert signal.getsignal(signal.SIGTERM) is handler and not found.wait(0.01)
        found.wake()
        assert not found.wait(5)
        found.close()
    finally:
        signal.signal(signal.SIGTERM, own)
    thread = threading.Thread(target=lambda: Terminated().close())
    thread.start()
    found = Terminated()
    found.close()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_was_woken_by_signals_is_again():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        Terminated().close()
    finally:
        woken = signal.set_wakeup_fd(before)
    assert woken == theirs.fileno()
    ours.close()
    theirs.close()
