"""`rl-lab report --serve`: the report as a live page of all runs below a folder.

A thread polls the run folders every few seconds and redraws the page after a change. The page polls the state of the
runs, and replaces what changed (live.js). web_access.py controls access.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import mimetypes
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from rl_lab.tools.report.runs import files_below, read_config, runs_below
from rl_lab.tools.report.status import run_status
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
SCRIPT = Path(__file__).with_name("live.js")
STATUS_S = 1.0
MOST_RUN_PAGES = 8  # pages of single runs that are kept


@dataclass
class Drawn:
    """A page as it is sent: complete, and without plotly.js for a browser that has it."""

    whole: bytes
    part: bytes
    files: dict[str, Path] = field(default_factory=dict)  # that it links to
    seen: Any = None  # the fingerprint of what it shows


class LiveReport:
    """The newest page of the runs below some folders, pages of single runs, and the files that they link to."""

    def __init__(self, folders: Sequence[Path], by: str = "config") -> None:
        self.folders = list(folders)
        self.by = by
        self.nonce = make_nonce()
        self.version = "0"
        self.overview = self._plain("The page is being drawn.")
        self._of_runs: OrderedDict[int, Drawn] = OrderedDict()
        self._numbers: dict[Path, int] = {}  # of the runs, in their addresses
        self._about: dict[Path, tuple[Any, str, int | None]] = {}  # config's time -> label and steps of a run
        self._status: tuple[float, bytes] | None = None  # when it was looked up
        self._asking = threading.Lock()
        self._drawing = threading.Lock()
        self.drawn = threading.Event()  # set when the first page is ready
        self._seen: Any = None
        self._failure = ""  # why the last refresh drew nothing
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="rl_lab_report_")

    @property
    def page(self) -> bytes:
        return self.overview.whole

    @property
    def part(self) -> bytes:
        return self.overview.part

    def file(self, name: str) -> Path | None:
        """Return the file of a link on one of the pages."""
        pages = [self.overview, *list(self._of_runs.values())]
        return next((page.files[name] for page in pages if name in page.files), None)

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
            page = self._draw(folders, version)
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
            page = self._plain(failure, version)
            with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
                print(failure, file=sys.stderr)
        self.overview, self.version, self._seen = page, version, seen
        self._failure = failure
        self.drawn.set()
        return True

    def runs(self) -> list[RunFolder]:
        found: dict[Path, RunFolder] = {}
        for folder in self.folders:
            own = [RunFolder(folder)] if (folder / "config.yaml").is_file() else runs_below(folder)
            found |= {run.path: run for run in own}
        for path in found:
            self._numbers.setdefault(path, len(self._numbers))
        return list(found.values())

    def status(self) -> bytes:
        """Return the state of every run as JSON, running ones first; looked up at most once a second."""
        with self._asking:
            now = time.monotonic()
            if self._status is None or now - self._status[0] > STATUS_S:
                self._status = now, self._find_status()
            return self._status[1]

    def _find_status(self) -> bytes:
        rows: list[dict[str, Any]] = []
        for folder in self.runs():
            label, steps = self._describe(folder)
            stamp = _stamp(self._fingerprint([folder]))
            about = {
                "number": self._numbers[folder.path],
                "label": label,
                "folder": str(folder.path),
                "stamp": stamp,
            }
            rows.append({**about, **run_status(folder, steps).plain()})
        rows.sort(key=lambda row: (row["state"] != "running", row["age"] is None, row["age"] or 0.0))
        return json.dumps({"version": self.version, "runs": rows}).encode()

    def run_page(self, number: int) -> Drawn | None:
        """Draw the page of one run, or return it if the run has not changed; None if there is no such run."""
        folder = next((run for run in self.runs() if self._numbers[run.path] == number), None)
        if folder is None:
            return None
        seen = self._fingerprint([folder])
        known = self._of_runs.get(number)
        if known is None or known.seen != seen:
            try:
                known = self._draw([folder], _stamp(seen), number)
            except Exception as error:
                text = str(error) if isinstance(error, LabError) else one_line(error)
                known = self._plain(f"The page could not be drawn: {text}", _stamp(seen), number)
            known.seen = seen
            self._of_runs[number] = known
            while len(self._of_runs) > MOST_RUN_PAGES:
                self._of_runs.popitem(last=False)
        return known

    def close(self) -> None:
        self._stop.set()
        self._scratch.cleanup()

    def _describe(self, folder: RunFolder) -> tuple[str, int | None]:
        """Return name, place and steps of a run; its config is read when it changes."""
        try:
            found = folder.config_file.stat()
            changed = (found.st_size, found.st_mtime)
        except OSError:
            changed = (0, 0.0)
        known = self._about.get(folder.path)
        if known is None or known[0] != changed:
            label, steps = "/".join(folder.path.parts[-2:]), None
            with contextlib.suppress(Exception):  # a damaged config: the page says so
                config = read_config(folder)
                total = config.get("training.total_timesteps")
                steps = int(total) if isinstance(total, int | float) else None
                seed = config.get("experiment.seed")
                name = str(config.get("experiment.name", folder.path.name))
                label = f"{name}, seed {seed} · {label}"
            known = self._about[folder.path] = (changed, label, steps)
        return known[1:]

    def _draw(self, folders: Sequence[RunFolder], stamp: str, number: int | None = None) -> Drawn:
        if not folders:
            where = ", ".join(str(folder) for folder in self.folders)
            return self._plain(f"There is no run below {where} yet. The page will show the first one.", stamp)
        files: dict[str, Path] = {}

        def link(file: Path) -> str:
            # The same file has the same address as long as it does not change: the browser keeps it.
            name = f"file/{_stamp((str(file), file.stat().st_mtime_ns))}{file.suffix.lower()}"
            files[name] = file
            return f"/{name}"

        scratch = Path(self._scratch.name, "all" if number is None else "one")
        with self._drawing:  # matplotlib's settings are the process's
            page, _ = page_of_runs(folders, scratch, self.by, pictures=False)
        page.script = self._script(stamp, number)
        whole, part = (
            render_page(page, scratch, link, embed=False, nonce=self.nonce, with_library=library).encode(
                errors="replace"
            )
            for library in (True, False)
        )
        return Drawn(whole, part, files)

    def _plain(self, text: str, stamp: str = "0", number: int | None = None) -> Drawn:
        page = Page("RL Lab", sections=[Section("Report", note=text)], script=self._script(stamp, number))
        content = render_page(page, Path()).encode(errors="replace")
        return Drawn(content, content)

    def _script(self, stamp: str, number: int | None) -> str:
        whose = "" if number is None else f' data-run="{number}"'
        return (
            f'<script nonce="{self.nonce}" data-stamp="{html.escape(stamp)}"{whose}>\n'
            f"{SCRIPT.read_text(encoding='utf-8')}</script>"
        )

    @staticmethod
    def _fingerprint(folders: Sequence[RunFolder]) -> tuple[Any, ...]:
        """Return what changes while a run trains: lengths of logs, evaluations, and the newest media file of each run."""
        facts: list[Any] = []
        for folder in folders:
            logs: list[tuple[float, ...] | None] = []
            for path in (folder.metrics, folder.config_file, folder.report):
                try:
                    found = path.stat()
                    logs.append((found.st_size, found.st_mtime))
                except OSError:  # missing or deleted
                    logs.append(None)
            media = [changed for _, changed in files_below(folder.media)]
            facts.append((str(folder.path), *logs, len(media), max(media, default=0.0)))
        return tuple(facts)


def _stamp(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]


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
        run = re.fullmatch(r"run/([0-9]{1,9})", name)
        page = name in ("", "index.html") or run is not None
        part = "part" in parse_qs(address.query)
        if page and (moved := access.redirect(headers, address.path if run else "/", token)):
            self._answer(HTTPStatus.SEE_OTHER, b"", more=moved)
        elif run is not None:
            drawn = live.run_page(int(run[1]))
            if drawn is None:
                self._answer(HTTPStatus.NOT_FOUND, b"There is no such run.\n")
            else:
                content = drawn.part if part else drawn.whole
                self._answer(HTTPStatus.OK, content, "text/html; charset=utf-8", nonce=live.nonce)
        elif page:
            content = live.part if part else live.page
            self._answer(HTTPStatus.OK, content, "text/html; charset=utf-8", nonce=live.nonce)
        elif name == "favicon.ico":  # browsers ask for it
            self._answer(HTTPStatus.NO_CONTENT, b"")
        elif name == "version":
            self._answer(HTTPStatus.OK, live.version.encode())
        elif name == "status":
            self._answer(HTTPStatus.OK, live.status(), "application/json")
        elif (file := live.file(name)) is not None:
            self._file(file)
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
            start, end = _range(self.headers.get("Range", ""), size)
            more = {"Accept-Ranges": "bytes"}
            if (start, end) != (0, size):  # players of films ask for parts
                more["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            file.seek(start)
            size = end - start
            self._head(
                HTTPStatus.PARTIAL_CONTENT if "Content-Range" in more else HTTPStatus.OK,
                size,
                kind,
                more=more,
            )
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


def _range(header: str, size: int) -> tuple[int, int]:
    """Return the first byte and the one after the last that a request asks for; all of them unless it names one range."""
    found = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header.strip())
    if not found or not size or found[1] == found[2] == "":
        return 0, size
    if not found[1]:  # the last bytes
        return max(0, size - int(found[2])), size
    start, end = int(found[1]), int(found[2]) + 1 if found[2] else size
    return (start, min(end, size)) if start < min(end, size) else (0, size)


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
