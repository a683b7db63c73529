"""`rl-lab report --serve`: the report as a live page of all runs below a folder.

A thread polls the run folders every few seconds and redraws the page after a change; the page polls its
version and reloads itself. web_access.py controls access.
"""

from __future__ import annotations

import contextlib
import html
import mimetypes
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rl_lab.errors import LabError, one_line
from rl_lab.run_folder import RunFolder
from rl_lab.run_folder import output_root as outputs_folder
from rl_lab.tools.report.command import page_of_runs
from rl_lab.tools.report.page import Page, Section, render_page
from rl_lab.tools.report.runs import files_below, runs_below
from rl_lab.tools.web_access import (
    IDLE_S,
    LONGEST_ANSWER_S,
    LONGEST_REQUEST_S,
    MOST_CONNECTIONS,
    REFUSED,
    WebAccess,
    make_nonce,
    page_headers,
)

POLL_SECONDS = 3.0  # between two polls of the run folders
BLOCK = 1 << 16  # bytes of a file that are sent at a time
REST = 3.0  # wait at least this many times as long as drawing took
SCRIPT = """<script nonce="%s">
const version = "%s";
setInterval(async () => {
  try {
    const answer = await fetch("version" + location.search);
    if (answer.ok && (await answer.text()) !== version &&
        ![...document.querySelectorAll("video")].some((video) => !video.paused)) location.reload();
  } catch (error) { document.title = "(disconnected) " + document.title.replace("(disconnected) ", ""); }
}, 3000);
</script>"""


class LiveReport:
    """The newest page of the runs below some folders, and the files that it links to."""

    def __init__(self, folders: Sequence[Path], by: str = "config") -> None:
        self.folders = list(folders)
        self.by = by
        self.nonce = make_nonce()
        self.files: dict[str, Path] = {}
        self.version = "0"
        self.page = self._plain("The page is being drawn.")
        self.drawn = threading.Event()  # set when the first page is ready
        self._seen: Any = None
        self._failure = ""  # why the last refresh drew nothing
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="rl_lab_report_")

    def watch(self) -> None:
        """Poll and draw until `close`; run it in a thread."""
        while not self._stop.is_set():
            start = time.monotonic()
            self.refresh()
            took = time.monotonic() - start
            self._stop.wait(max(POLL_SECONDS, REST * took))

    def refresh(self) -> bool:
        """Redraw the page if a run changed; returns whether it did.

        A partly written run is drawn next time.
        """
        version = str(int(self.version) + 1)
        seen, failure = None, ""
        try:
            folders = self.runs()
            seen = self._fingerprint(folders)
            if seen == self._seen:
                return False
            page, files = self._draw(folders, version)
        except Exception as error:  # the files may be readable at the next poll
            if self._stop.is_set():
                return False
            expected = isinstance(error, LabError)
            # A LabError is about the content of the files: it stays until they change. Other errors are
            # retried.
            self._seen = seen = seen if expected else None
            failure = f"The page could not be drawn: {error if expected else one_line(error)}"
            if failure == self._failure:
                return False
            page, files = self._plain(failure, version), {}
            with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
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
            return name

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
        """Return what changes while a run trains: lengths of logs, and the newest media file of each run."""
        facts: list[Any] = []
        for folder in folders:
            logs: list[tuple[float, ...] | None] = []
            for path in (folder.metrics, folder.config_file):
                try:
                    found = path.stat()
                    logs.append((found.st_size, found.st_mtime))
                except OSError:  # missing or deleted
                    logs.append(None)
            media = [changed for _, changed in files_below(folder.media)]
            facts.append((str(folder.path), *logs, len(media), max(media, default=0.0)))
        return tuple(facts)


class Server(ThreadingHTTPServer):
    """Serves one LiveReport to allowed clients, at most `MOST_CONNECTIONS` at a time, each for a limited time."""

    daemon_threads = True

    def __init__(self, live: LiveReport, access: WebAccess, port: int) -> None:
        self.live = live
        self.access = access
        self.deadlines: dict[socket.socket, float] = {}  # open connections -> when they are closed
        self.address_family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
        try:
            super().__init__((access.host, port), Handler)
        except OSError as error:
            raise LabError(
                f"--port {port}: cannot serve on {access.host}:{port} ({error.strerror or error}); choose another --port"
            ) from error

    @property
    def url(self) -> str:
        return self.access.url(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self.deadlines) < MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self.deadlines[request] = time.monotonic() + LONGEST_REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose time is over; called a few times a second."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that close a connection early are no error of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page, its version, and the files it links to."""

    server: Server
    server_version = "rl-lab"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        self.server.deadlines[self.connection] = time.monotonic() + LONGEST_ANSWER_S
        try:
            address = urlsplit(self.path)
        except ValueError:  # "//[" and the like
            self._answer(HTTPStatus.BAD_REQUEST, b"That is no address.\n")
            return
        headers, access = dict(self.headers.items()), self.server.access
        token = parse_qs(address.query).get("token", [None])[0]
        if not access.allowed(headers, token, self.client_address[0]):
            self._answer(HTTPStatus.FORBIDDEN, REFUSED.encode())
            return
        live = self.server.live
        name = address.path.lstrip("/")
        if name in ("", "index.html") and (moved := access.redirect(headers, "/", token)):
            self._answer(HTTPStatus.SEE_OTHER, b"", more=moved)
        elif name in ("", "index.html"):
            self._answer(HTTPStatus.OK, live.page, "text/html; charset=utf-8", nonce=live.nonce)
        elif name == "favicon.ico":  # browsers ask for it
            self._answer(HTTPStatus.NO_CONTENT, b"")
        elif name == "version":
            self._answer(HTTPStatus.OK, live.version.encode())
        elif name in live.files:
            self._file(live.files[name])
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is no such page.\n")

    do_HEAD = do_GET

    def _file(self, path: Path) -> None:
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError:
            self._answer(HTTPStatus.NOT_FOUND, b"The file was deleted.\n")
            return
        with file:
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            size = os.fstat(file.fileno()).st_size
            self._head(HTTPStatus.OK, size, kind)
            while self.command != "HEAD" and size > 0 and (block := file.read(min(BLOCK, size))):
                self.wfile.write(block)
                size -= len(block)

    def _answer(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = "text/plain; charset=utf-8",
        *,
        nonce: str = "",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._head(status, len(content), kind, nonce, more)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(
        self, status: HTTPStatus, size: int, kind: str, nonce: str = "", more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        for name, value in {**page_headers(nonce), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: URLs contain the token, and the page polls every few seconds."""


def serve(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    by: str = "config",
    output_root: str | None = None,
) -> int:
    """Serve until Ctrl-C. Without runs: all runs below the outputs folder."""
    folders = [Path(run).expanduser() for run in runs] or [outputs_folder(output_root)]
    for folder in folders:
        if runs and not folder.is_dir():
            raise LabError(f"{folder}: there is no such folder to report on")
    access = WebAccess(host, token)
    live = LiveReport(folders, by)
    server = Server(live, access, port)
    threading.Thread(target=live.watch, daemon=True).start()
    print(f"serving {', '.join(str(folder) for folder in folders)} at {server.url} (stop with Ctrl-C)")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.server_close()
        live.close()
    return 0
