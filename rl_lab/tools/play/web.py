"""`rl-lab play --web`: page, WebSocket and downloads with Starlette on uvicorn, by the rules of web_access.py."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
import threading
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs

from rl_lab.errors import LabError, MissingPackageError, install_line
from rl_lab.tools.play.session import PlaySession
from rl_lab.tools.web_access import LARGEST_MESSAGE, REFUSED, WebAccess, make_nonce, page_headers

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import MutableHeaders
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from starlette.websockets import WebSocket

    from rl_lab.tools.play.clients import Clients
except ModuleNotFoundError as error:
    raise MissingPackageError(f"--web needs the package '{error.name}': {install_line('play')}") from error

DOWNLOADS = {".mp4": "video/mp4", ".gif": "image/gif", ".npz": "application/octet-stream"}


class AccessMiddleware:
    """ASGI middleware that rejects HTTP and WebSocket requests without access, and adds the headers of pages."""

    def __init__(self, app: ASGIApp, access: WebAccess) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        token = query.get("token", [None])[0]
        client = scope.get("client")
        allowed = self.access.allowed(headers, token, client[0] if client else "")
        if scope["type"] == "websocket":
            if allowed:
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        if not allowed:
            answer: ASGIApp = PlainTextResponse(REFUSED, status_code=403)
        elif scope["path"] == "/" and (moved := self.access.redirect(headers, "/", token)):
            answer = Response(status_code=303, headers=moved)
        else:
            answer = self.app
        await answer(scope, receive, _with_headers(send))


def _with_headers(send: Send) -> Send:
    """Add the headers that the answer does not have itself."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in page_headers().items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def make_app(session: PlaySession, access: WebAccess) -> ASGIApp:
    """Return the ASGI application with access control."""
    clients = Clients(session)
    html = files("rl_lab.tools.play").joinpath("page.html").read_text(encoding="utf-8")

    async def page(request: Request) -> HTMLResponse:
        nonce = make_nonce()
        shown = html.replace("<script>", f'<script nonce="{nonce}">', 1)
        return HTMLResponse(shown, headers=page_headers(nonce, request.headers.get("host", "")))

    async def no_icon(request: Request) -> Response:
        return Response(status_code=204)  # browsers ask for it

    async def listing(request: Request) -> JSONResponse:
        recordings = session.sources.recordings
        found = sorted(_recordings(recordings).items(), key=lambda item: item[1].st_mtime, reverse=True)[:50]
        return JSONResponse([{"name": file.name, "bytes": facts.st_size} for file, facts in found])

    async def download(request: Request) -> FileResponse | PlainTextResponse:
        # Looked up among the existing files, so that no name can leave the folder.
        recordings = session.sources.recordings
        found = {file.name: file for file in _recordings(recordings)}.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such recording\n", status_code=404)
        return FileResponse(found, media_type=DOWNLOADS[found.suffix], filename=found.name)

    async def start_picture(request: Request) -> Response:
        shown, at = session.picks, request.path_params["index"]  # the list is replaced, never changed
        if at >= len(shown):
            return PlainTextResponse("no such start\n", status_code=404)
        return Response(shown[at].png, media_type="image/png")

    async def live(socket: WebSocket) -> None:
        await clients.serve(socket)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        clients.start()
        try:
            yield
        finally:
            await clients.stop()

    routes = [
        Route("/", page),
        Route("/favicon.ico", no_icon),
        Route("/recordings", listing),
        Route("/recordings/{name}", download),
        Route("/starts/{round:int}/{index:int}", start_picture),
        WebSocketRoute("/live", live),
    ]
    return AccessMiddleware(Starlette(routes=routes, lifespan=lifespan), access)


def serve(
    session: PlaySession,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    show: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until Ctrl-C. show: open the page in this machine's browser."""
    access = WebAccess(host, token)
    listener = bind(host, port)
    url = access.url(listener.getsockname()[1])
    say(f"play in a browser: {url}")
    if access.loopback:
        say(
            "only this machine can open it; from another machine use ssh -L PORT:localhost:PORT or --host 0.0.0.0"
        )
    server = make_server(make_app(session, access))
    if show:  # the socket listens already, so the page waits until the server answers
        threading.Thread(target=open_page, args=(url,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def open_page(url: str) -> None:
    """Open a page in the browser of this machine; nothing happens where there is none."""
    import webbrowser

    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


def make_server(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        # Not uvicorn's own config: it would close the handlers that other packages gave to `logging`.
        log_config=None,
        log_level="error",
        ws="auto",
        ws_max_size=LARGEST_MESSAGE,
        h11_max_incomplete_event_size=LARGEST_MESSAGE,
        ws_per_message_deflate=False,  # images are compressed already
        ws_ping_interval=10.0,
        ws_ping_timeout=20.0,  # a lost connection is closed after this time
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    return uvicorn.Server(config)


def bind(host: str, port: int) -> sockets.socket:
    """Return a listening socket; LabError if the address is not available."""
    try:
        family = sockets.getaddrinfo(host or "0.0.0.0", port, type=sockets.SOCK_STREAM)[0][0]
        listener = sockets.socket(family, sockets.SOCK_STREAM)
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Listen before the URL is printed, so that an early connection waits and is not refused.
        listener.listen(128)
    except (OSError, OverflowError) as error:
        raise LabError(
            f"--port {port}: cannot serve on {host}:{port} ({error}); --port 0 takes a free port"
        ) from error
    return listener


def _recordings(folder: Path) -> dict[Path, os.stat_result]:
    """Return the recordings with size and time. Links are left out: they may lead to any file."""
    found = {}
    for file in folder.glob("*") if not folder.is_symlink() and not folder.parent.is_symlink() else ():
        with contextlib.suppress(OSError):  # it was deleted
            facts = file.lstat()
            if file.suffix in DOWNLOADS and not file.name.startswith(".") and stat.S_ISREG(facts.st_mode):
                found[file] = facts
    return found
