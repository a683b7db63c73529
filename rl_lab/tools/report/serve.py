"""`rl-lab report --serve`: the report as a live page over all runs below a folder.

A thread looks at the run folders every few seconds and draws the page anew when one has changed; the page asks for
its version and loads itself again. Who may see it is decided by web_access.py.
"""

from __future__ import annotations

import contextlib
import html
import mimetypes
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from rl_lab.errors import LabError, one_line
from rl_lab.run_folder import RunFolder
from rl_lab.run_folder import output_root as outputs_folder
from rl_lab.tools.report.command import page_of_runs
from rl_lab.tools.report.page import Page, Section, render_page
from rl_lab.tools.report.runs import files_below, runs_below
from rl_lab.tools.web_access import WebAccess

LOOK_SECONDS = 3.0  # between two looks at the run folders
REST = 3.0  # drawing takes at most one part in so many of the time
SCRIPT = """<script nonce="%s">
const version = "%s";
setInterval(async () => {
  try {
    const answer = await fetch("version" + location.search);
    if (answer.ok && (await answer.text()) !== version &&
        ![...document.querySelectorAll("video")].some((video) => !video.paused)) location.reload();
  } catch (error) { document.title = "(not answering) " + document.title.replace("(not answering) ", ""); }
}, 3000);
</script>"""


class LiveReport:
    """The newest page over the runs below some folders, and the files that it links to."""

    def __init__(self, folders: Sequence[Path], by: str = "config", token: str | None = None) -> None:
        self.folders = list(folders)
        self.by = by
        self._query = f"?token={quote(token, safe='')}" if token else ""
        self.nonce = secrets.token_urlsafe(12)
        self.files: dict[str, Path] = {}
        self.version = "0"
        self.page = self._plain("The page is being drawn.")
        self.drawn = threading.Event()  # the first page is there
        self._seen: Any = None
        self._failure = ""  # why the last look drew nothing
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="rl_lab_report_")

    def watch(self) -> None:
        """Look and draw until `close`. Meant for a thread of its own."""
        while not self._stop.is_set():
            start = time.monotonic()
            self.refresh()
            took = time.monotonic() - start
            self._stop.wait(max(LOOK_SECONDS, REST * took))

    def refresh(self) -> bool:
        """Draw the page anew if something has changed; whether it was. A run half written is drawn next time."""
        version = str(int(self.version) + 1)
        seen, failure = None, ""
        try:
            folders = self.runs()
            seen = self._fingerprint(folders)
            if seen == self._seen:
                return False
            page, files = self._draw(folders, version)
        except Exception as error:  # whatever lies in the folders, the next look may find it in order
            if self._stop.is_set():
                return False
            expected = isinstance(error, LabError)
            # A LabError is about what lies in the files: it stays until they change. Anything else is tried again.
            self._seen = seen = seen if expected else None
            failure = f"The page could not be drawn: {error if expected else one_line(error)}"
            if failure == self._failure:
                return False
            page, files = self._plain(failure, version), {}
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                print(failure, file=sys.stderr)
        self.page, self.files, self.version, self._seen = page, files, version, seen
        self._failure = failure
        self.drawn.set()
        return True

    def runs(self) -> list[RunFolder]:
        found: dict[Path, RunFolder] = {}
        for folder in self.folders:
            own = [RunFolder(folder)] if (folder / "config.yaml").is_file() else runs_below(folder)
            found |= {run.path: run for run in own}
        return list(found.values())

    def close(self) -> None:
        self._stop.set()
        self._scratch.cleanup()

    def _draw(self, folders: Sequence[RunFolder], version: str) -> tuple[bytes, dict[str, Path]]:
        if not folders:
            where = ", ".join(str(folder) for folder in self.folders)
            return self._plain(
                f"There is no run below {where} yet. The page will show the first one.", version
            ), {}
        files: dict[str, Path] = {}

        def link(file: Path) -> str:
            name = f"file/{len(files)}{file.suffix.lower()}"
            files[name] = file
            return name + self._query

        page, _ = page_of_runs(folders, Path(self._scratch.name), self.by)
        page.script = self._script(version)
        return render_page(page, Path(self._scratch.name), link).encode(errors="replace"), files

    def _plain(self, text: str, version: str = "0") -> bytes:
        page = Page("RL Lab", sections=[Section("Report", note=text)], script=self._script(version))
        return render_page(page, Path()).encode(errors="replace")

    def _script(self, version: str) -> str:
        return SCRIPT % (self.nonce, html.escape(version))

    @staticmethod
    def _fingerprint(folders: Sequence[RunFolder]) -> tuple[Any, ...]:
        """What changes when a run goes on: lengths of logs, and the newest file in each folder of media."""
        facts: list[Any] = []
        for folder in folders:
            logs: list[tuple[float, ...] | None] = []
            for path in (folder.metrics, folder.config_file):
                try:
                    found = path.stat()
                    logs.append((found.st_size, found.st_mtime))
                except OSError:  # not there, or no longer
                    logs.append(None)
            media = [changed for _, changed in files_below(folder.media)]
            facts.append((str(folder.path), *logs, len(media), max(media, default=0.0)))
        return tuple(facts)


class Server(ThreadingHTTPServer):
    """Serves one LiveReport to those who may see it."""

    daemon_threads = True

    def __init__(self, live: LiveReport, access: WebAccess, port: int) -> None:
        self.live = live
        self.access = access
        self.address_family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
        try:
            super().__init__((access.host, port), Handler)
        except OSError as error:
            raise LabError(
                f"cannot serve on {access.host}:{port}: {error.strerror or error}; choose another --port"
            ) from error

    @property
    def url(self) -> str:
        return self.access.url(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    """GET of the page, of its version, and of the files it links to; nothing else."""

    server: Server
    server_version = "rl-lab"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token = parse_qs(address.query).get("token", [None])[0]
        if not self.server.access.allowed(dict(self.headers.items()), token, self.client_address[0]):
            self._answer(
                HTTPStatus.FORBIDDEN,
                b"The token is missing or wrong, or the request came from another page.\n",
            )
            return
        live = self.server.live
        name = address.path.lstrip("/")
        if name in ("", "index.html"):
            self._answer(HTTPStatus.OK, live.page, "text/html; charset=utf-8")
        elif name == "version":
            self._answer(HTTPStatus.OK, live.version.encode())
        elif name in live.files:
            self._file(live.files[name])
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is no such thing here.\n")

    do_HEAD = do_GET

    def _file(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError:
            self._answer(HTTPStatus.NOT_FOUND, b"The file is gone.\n")
            return
        self._answer(HTTPStatus.OK, content, mimetypes.guess_type(path.name)[0] or "application/octet-stream")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address carries the token
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; img-src data:; media-src data: 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
            f"script-src 'nonce-{self.server.live.nonce}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses carry the token, and a page that asks every few seconds would fill the terminal."""


def serve(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    by: str = "config",
    output_root: str | None = None,
) -> int:
    """Serve until Ctrl-C. Without names: everything below the outputs folder."""
    folders = [Path(run).expanduser() for run in runs] or [outputs_folder(output_root)]
    for folder in folders:
        if runs and not folder.is_dir():
            raise LabError(f"there is no folder {folder} to report on")
    access = WebAccess(host, token)
    live = LiveReport(folders, by, access.token)
    server = Server(live, access, port)
    threading.Thread(target=live.watch, daemon=True).start()
    print(f"serving {', '.join(str(folder) for folder in folders)} at {server.url} (Ctrl-C ends it)")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.server_close()
        live.close()
    return 0
