"""`rl-lab play --web`: page, WebSocket and downloads with Starlette on uvicorn.

Web_access.py controls access.
"""

from __future__ import annotations

import contextlib
import socket as sockets
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rl_lab.errors import LabError, MissingPackageError, install_line
from rl_lab.run_folder import RunFolder
from rl_lab.tools.play.keyboard import CONTROLS, REPLAY_CONTROLS, control_legend, show
from rl_lab.tools.play.session import PlaySession
from rl_lab.tools.web_access import WebAccess

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket

    from rl_lab.tools.play.clients import Clients
except ModuleNotFoundError as error:
    raise MissingPackageError(f"--web needs the package '{error.name}': {install_line('play')}") from error

DOWNLOADS = {".mp4": "video/mp4", ".gif": "image/gif", ".npz": "application/octet-stream"}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
    "connect-src 'self' ws: wss:; media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class AccessMiddleware:
    """ASGI middleware that rejects HTTP and WebSocket requests without access."""

    def __init__(self, app: ASGIApp, access: WebAccess) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._allowed(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                text = "A token is required: open the link that rl-lab play printed.\n"
                await PlainTextResponse(text, status_code=403)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        client = scope.get("client")
        return self.access.allowed(headers, tokens[0] if tokens else None, client[0] if client else "")


def make_app(session: PlaySession, about: dict[str, str], media: Path, access: WebAccess) -> ASGIApp:
    """Return the ASGI application with access control."""
    clients = Clients(session, {**about, **legend(session)})
    recordings = media / "recordings"
    html = files("rl_lab.tools.play").joinpath("page.html").read_text(encoding="utf-8")
    safe = {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(html, headers={**safe, "Cache-Control": "no-store"})

    async def listing(request: Request) -> JSONResponse:
        found = sorted(_recordings(recordings), key=lambda file: file.stat().st_mtime, reverse=True)[:50]
        return JSONResponse(
            [{"name": file.name, "bytes": file.stat().st_size} for file in found], headers=safe
        )

    async def download(request: Request) -> FileResponse | PlainTextResponse:
        # Looked up among the existing files, so that no name can leave the folder.
        found = {file.name: file for file in _recordings(recordings)}.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such recording\n", status_code=404)
        return FileResponse(found, media_type=DOWNLOADS[found.suffix], filename=found.name, headers=safe)

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
        Route("/recordings", listing),
        Route("/recordings/{name}", download),
        WebSocketRoute("/live", live),
    ]
    return AccessMiddleware(Starlette(routes=routes, lifespan=lifespan), access)


def legend(session: PlaySession) -> dict[str, Any]:
    """Return the keys that the page shows."""
    return {
        "keys": session.keymap.legend,
        "action_keys": sorted(session.keymap.known_keys()),
        "controls": control_legend(),
        "control_keys": sorted(CONTROLS),
        "replay": [[show(key), text] for key, (_, _, text) in REPLAY_CONTROLS.items()],
        "replay_keys": sorted(REPLAY_CONTROLS),
    }


def serve(
    session: PlaySession,
    about: dict[str, str],
    folder: RunFolder,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until Ctrl-C."""
    access = WebAccess(host, token)
    listener = bind(host, port)
    say(f"play in a browser: {access.url(listener.getsockname()[1])}")
    if access.loopback:
        say(
            "only this machine can open it; from another machine use ssh -L PORT:localhost:PORT or --host 0.0.0.0"
        )
    server = make_server(make_app(session, about, folder.media, access))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def make_server(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        # Not uvicorn's own config: it would close the handlers that other packages gave to `logging`.
        log_config=None,
        log_level="error",
        ws="auto",
        ws_max_size=64 * 1024,
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


def _recordings(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if file.suffix in DOWNLOADS and not file.name.startswith(".")]
