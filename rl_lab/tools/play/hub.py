"""Who is looking, and which of them steers. Lives in the server's event loop.

The first page has the controls; later ones look on. When it closes, the controls are free: the next page that opens
takes them, or one that looks on asks for them. When nobody is looking the session rests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from rl_lab.tools.play.commands import Command
from rl_lab.tools.play.runner import Runner
from rl_lab.tools.play.session import PlaySession
from rl_lab.tools.play.wire import decode_request, encode_frame

MOST_VIEWERS = 64


class Viewer:
    """One open page: the newest frame and status that it has not got yet. A slow one misses frames, and delays nobody."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.frame: bytes | None = None
        self.status: str | None = None
        self.news = asyncio.Event()

    def offer(self, *, frame: bytes | None = None, status: str | None = None) -> None:
        self.frame = frame if frame is not None else self.frame
        self.status = status if status is not None else self.status
        self.news.set()

    async def write(self) -> None:
        while True:
            await self.news.wait()
            self.news.clear()
            status, frame, self.status, self.frame = self.status, self.frame, None, None
            if status is not None:
                await self.socket.send_text(status)
            if frame is not None:
                await self.socket.send_bytes(frame)


class Hub:
    """Pages on one side, the session's thread on the other."""

    def __init__(self, session: PlaySession, about: dict[str, Any]) -> None:
        self.session = session
        self.about = about
        self.runner = Runner(session, self._from_thread)
        self.viewers: list[Viewer] = []
        self.driver: Viewer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frame: bytes | None = None
        self._status: dict[str, Any] = {}
        self._sent_changes = -1

    def start(self) -> None:
        """Begin; called inside the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._status = self.session.status()
        self._frame = encode_frame(self.session)
        self.runner.start()

    async def stop(self) -> None:
        """End the session: its thread, an open recording, the environment."""

        def end() -> None:
            self.runner.stop()
            self.session.close()

        await asyncio.get_running_loop().run_in_executor(None, end)

    async def serve(self, socket: WebSocket) -> None:
        """One page, from its opening to its closing."""
        await socket.accept()
        if len(self.viewers) >= MOST_VIEWERS:
            await socket.close(code=1013, reason="too many viewers")
            return
        viewer = Viewer(socket)
        self.viewers.append(viewer)
        if self.driver is None:
            self.driver = viewer
        self.runner.set_active(True)
        viewer.offer(frame=self._frame)
        self._tell()
        self.runner.refresh()
        writer = asyncio.create_task(viewer.write())
        reader = asyncio.create_task(self._read(viewer))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            self._left(viewer)
            if socket.application_state is not WebSocketState.DISCONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await socket.close()

    async def _read(self, viewer: Viewer) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                message = await viewer.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                request = decode_request(message.get("text"))
                if request == "take" and self.driver is None:
                    self.driver = viewer
                    self._tell()
                elif isinstance(request, Command) and viewer is self.driver:
                    self.runner.submit(request)

    def _left(self, viewer: Viewer) -> None:
        self.viewers.remove(viewer)
        if viewer is self.driver:
            self.driver = None
            self.runner.submit(Command("release"))
            self.runner.submit(Command("record", False))
        self.runner.set_active(bool(self.viewers))
        self._tell()

    def _tell(self) -> None:
        """Everybody's status: the same for all but who steers."""
        for viewer in self.viewers:
            mine = {
                "steers": viewer is self.driver,
                "free": self.driver is None,
                "viewers": len(self.viewers),
                "about": self.about,
            }
            viewer.offer(status=json.dumps({**self._status, **mine}))

    def _from_thread(self, session: PlaySession) -> None:
        """The session moved on; called in its thread, which alone may read it."""
        frame = encode_frame(session)
        status: dict[str, Any] | None = None
        if session.changes != self._sent_changes or session.mode == "episodes":
            self._sent_changes = session.changes
            status = session.status()
        self._call(lambda: self._publish(frame, status))

    def _publish(self, frame: bytes, status: dict[str, Any] | None) -> None:
        self._frame = frame
        for viewer in self.viewers:
            viewer.offer(frame=frame)
        if status is not None:
            self._status = status
            self._tell()

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)
