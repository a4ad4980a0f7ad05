"""Layout of pages in Chromium, which loads them from a server on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROGRAM = "chromium"

#: Loads each page into a frame of each width, and posts the pages that are wider.
_LOOK = """<!doctype html><body><script>
const load = (frame, page) => new Promise(done => { frame.onload = done; frame.src = page; });
(async () => {
  const wide = [];
  for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `border: 0; width: ${width}px; height: 900px`;
    document.body.append(frame);
    for (const page of PAGES) {
      await load(frame, page);
      const shown = frame.contentWindow;
      if (shown.document.scrollingElement.scrollWidth > shown.innerWidth) wide.push([page, width]);
    }
  }
  await fetch("/", {method: "POST", body: JSON.stringify(wide)});
})();
</script>"""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, look: str) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.look = look.encode()
        self.posted: str | None = None
        self.is_over = threading.Event()


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.look)

    def do_POST(self) -> None:
        self.server.posted = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.is_over.set()
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _serving(server: _Server) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def too_wide(
    folder: Path, widths: Sequence[int], profile: Path, timeout_s: float
) -> list[tuple[str, int]]:
    """Return each page below `folder` that scrolls sideways, with the width of its window.

    `profile` is an empty directory for files of Chromium.
    """
    pages = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.html"))
    assert pages
    look = _LOOK.replace("WIDTHS", json.dumps(widths)).replace("PAGES", json.dumps(pages))
    server = _Server(folder, look)
    with _serving(server) as address, (profile / "log").open("wb") as log:
        # The sandbox needs rights that a container may lack; the pages are those of this folder.
        argv = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", f"--user-data-dir={profile}", address]  # fmt: skip
        browser = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            is_over = server.is_over.wait(timeout_s)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
    assert is_over, (profile / "log").read_text(errors="replace")[-2000:]
    assert server.posted is not None
    return [(page, width) for page, width in json.loads(server.posted)]
