"""JupyterLab as `make lab` opens it, from a checkout in a folder with spaces and other letters, and a browser.

They are driven by playwright in the machine's own Chromium. Where either is not there, the tests say so and skip.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 300  # for one page to run, on shared cores


@pytest.fixture(scope="module")
def chromium():
    """The path of a Chromium of the machine."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip(f"there is no {', '.join(CHROMIUM)} on PATH: install one (Debian: apt install chromium)")
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout's files under a name that a careless command would trip over, with a reader's copies."""
    copy = tmp_path_factory.mktemp("lab") / "für zwei, it's here"
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    pages = sorted(str(path.relative_to(copy)) for path in copy.glob("notebooks/*.ipynb"))
    for command in (["tools/learn.py", "--out", "learn", *pages], ["tools/start_page.py", "learn"]):
        subprocess.run([sys.executable, *command], cwd=copy, check=True, env=environment(copy))
    return copy


@pytest.fixture(scope="module")
def lab(checkout):
    """The one line that `make lab` says: the address of the start page."""
    server = subprocess.Popen(
        [sys.executable, "tools/lab.py", "learn", "--no-browser"], cwd=checkout, text=True, start_new_session=True,
        env=environment(checkout) | {"MPLBACKEND": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = server.stdout.readline()
        reader = threading.Thread(target=server.stdout.read)  # else a full pipe stops it
        reader.start()
        address = re.search(r"http://\S+", said)
        assert address, said
        wait_for(int(re.search(r":(\d+)/", address[0])[1]))
        yield address[0]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        reader.join(30)
        server.stdout.close()


def environment(checkout):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JUPYTER"))}
    kept.pop("MPLBACKEND", None)
    return kept | {"PYTHONPATH": str(checkout)}


def wait_for(port):
    for _ in range(600):
        with socket.socket() as asked:
            asked.settimeout(0.1)
            if asked.connect_ex(("localhost", port)) == 0:
                return
        threading.Event().wait(0.1)
    raise TimeoutError(f"nobody listens on port {port} after a minute")


@pytest.fixture(scope="module")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        yield running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def tab(browser):
    """A new tab, wide; `tab.set_viewport_size` makes it narrow."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    yield context.new_page()
    context.close()


@pytest.fixture
def opened(tab, lab):
    """A function that opens a notebook of learn/ in the tab and returns the tab, once its cells are drawn."""
    def open_it(name):
        tab.goto(lab.replace("INDEX.ipynb", name).replace("/lab/tree/", "/doc/tree/") + "&reset")
        tab.wait_for_selector(".jp-Notebook .jp-Cell", timeout=SECONDS * 1000)
        tab.wait_for_timeout(2000)  # menus and the kernel are there a little later
        return tab

    return open_it
