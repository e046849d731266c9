"""Opens JupyterLab on a reader's copies of the pages, and says where it is in one line.

usage: python tools/lab.py learn [what goes to JupyterLab]

The checkout is the lab's root, so that links from a page to the package and to docs/ work.
"""

import os
import secrets
import socket
import sys
from pathlib import Path
from urllib.parse import quote

from start_page import INDEX, ROOT

FIRST, TRIED = 8888, 50  # ports


def main() -> None:
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    port, own = asked_port(asked), []
    if port is None:
        port = next((each for each in range(FIRST, FIRST + TRIED) if free(each)), None)
        if port is None:
            sys.exit(f"make lab: ports {FIRST} to {FIRST + TRIED - 1} are in use: name one, LAB_ARGS=\"--port N\"")
        own = [f"--port={port}"]
    elif not free(port):
        sys.exit(f"make lab: port {port} is in use: name another, LAB_ARGS=\"--port N\"")
    page = f"/lab/tree/{quote(folder.as_posix())}/{INDEX}"
    token = os.environ.setdefault("JUPYTER_TOKEN", secrets.token_hex(16))
    print(f"JupyterLab is at http://localhost:{port}{page}?token={token} (Ctrl+C twice ends it)", flush=True)
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", "--log-level=WARN", *own,
                              "--ServerApp.port_retries=0", f"--FileContentsManager.preferred_dir={folder.as_posix()}",
                              f"--LabApp.default_url={page}", *root, *asked])


def asked_port(words: list[str]) -> int | None:
    """Return the port that the reader's own words name; None if they name none."""
    for word, after in zip(words, [*words[1:], ""], strict=False):  # of no words one is left over
        name, _, value = word.partition("=")
        if name in ("--port", "--ServerApp.port"):
            value = value or after
            if not value.isdecimal():
                sys.exit(f"make lab: --port {value}: expected a number")
            return int(value)
    return None


def free(port: int) -> bool:
    """Tell whether a server could listen on a port of this machine."""
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind(("localhost", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    main()
