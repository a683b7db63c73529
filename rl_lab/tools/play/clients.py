"""Web clients of a session: the message protocol, the session thread, and the connected pages.

The first page has the controls; later pages only watch. When it closes, the controls are free: the next page
that opens gets them, or a watching page requests them. Without pages the session pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from rl_lab.errors import LabError
from rl_lab.tools.play.commands import Command, parse_command
from rl_lab.tools.play.keyboard import CONTROLS, REPLAY_CONTROLS, DiscreteKeys, control_legend, show
from rl_lab.tools.play.keymaps import pad_keys
from rl_lab.tools.play.session import PlaySession

# --- Protocol ---

# The server sends frames (binary) and status (JSON); the page sends requests (JSON). A frame is a
# little-endian uint32 n, n bytes of JSON {"panels": [{title, width, height, type, bytes}], "header": [[name,
# value], …], "step", "ack", "done", "dream", "numbers"}, then the encoded images.

SMALL = 128 * 128  # pixels; images up to this size are sent as PNG
LARGEST_MESSAGE = 4096  # bytes of a request


def encode_frame(session: PlaySession) -> bytes:
    """Encode the current frame of a session as one message."""
    images, panels = [], []
    for title, image in session.panels():
        kind, data = encode_image(image)
        images.append(data)
        height, width = image.shape[:2]
        panels.append({"title": title, "width": width, "height": height, "type": kind, "bytes": len(data)})
    frame = session.current
    values = {"reward": frame.reward, **session.policy_values, **frame.extra}
    head = {
        "panels": panels,
        "header": session.header(),
        "step": session.step,
        "ack": session.acknowledged,
        "done": frame.done,
        "dream": session.dream_status(),
        "numbers": {name: value for name, value in values.items() if math.isfinite(value)},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *images])


def decode_frame(message: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head of a frame message and its encoded images."""
    (size,) = struct.unpack_from("<I", message)
    head = json.loads(message[4 : 4 + size])
    images, at = [], 4 + size
    for panel in head["panels"]:
        images.append(message[at : at + panel["bytes"]])
        at += panel["bytes"]
    return head, images


def legend(session: PlaySession) -> dict[str, Any]:
    """Return the keys that the page shows."""
    return {
        "keys": session.keymap.legend,
        "action_keys": sorted(session.keymap.known_keys()),
        "controls": control_legend(),
        "control_keys": sorted(CONTROLS),
        "replay": [[show(key), text] for key, (_, _, text) in REPLAY_CONTROLS.items()],
        "replay_keys": sorted(REPLAY_CONTROLS),
        "pad": pad_keys(session.keymap),
        "alternatives": isinstance(session.keymap, DiscreteKeys),  # the keys of a line do the same
    }


def encode_image(image: np.ndarray) -> tuple[str, bytes]:
    """Return media type and bytes: lossless PNG for small images, JPEG for large ones."""
    from PIL import Image

    buffer = io.BytesIO()
    encoded = Image.fromarray(np.ascontiguousarray(image))
    if image.shape[0] * image.shape[1] <= SMALL:
        encoded.save(buffer, format="PNG", compress_level=1)
        return "image/png", buffer.getvalue()
    encoded.save(buffer, format="JPEG", quality=90)
    return "image/jpeg", buffer.getvalue()


def decode_request(text: str | bytes | None) -> Command | str | None:
    """Decode a request of a page: a Command, "take" (the controls), or None if it is invalid."""
    if not isinstance(text, str) or len(text) > LARGEST_MESSAGE:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if message == {"do": "take"}:
        return "take"
    return parse_command(message)


# --- Session thread ---

MOST_WAITING = 256  # requests; older ones are dropped


class Runner(threading.Thread):
    """Thread that steps a session and calls `on_change` after every step and request.

    A separate thread keeps the server responsive while a model computes. It pauses while `active` is False
    (no page is open). Only this thread may access the session.
    """

    def __init__(self, session: PlaySession, on_change: Callable[[PlaySession], None]) -> None:
        super().__init__(name="play", daemon=True)
        self.session = session
        self.on_change = on_change
        self.active = False
        self._commands: deque[Command] = deque(maxlen=MOST_WAITING)
        self._wake = threading.Condition()
        self._stopping = False
        self._dirty = False

    def submit(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def set_active(self, active: bool) -> None:
        with self._wake:
            self.active = active
            self._wake.notify()

    def refresh(self) -> None:
        """Call `on_change` again, for a new page."""
        with self._wake:
            self._dirty = True
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while True:
            with self._wake:
                if not self._commands and not self._dirty and not self._stopping:
                    self._wake.wait(self.session.wait_seconds() if self.active else None)
                if self._stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
                dirty, self._dirty = self._dirty, False
            if self._run_once(commands) or commands or dirty:
                self.on_change(self.session)

    def _run_once(self, commands: list[Command]) -> bool:
        """Execute the commands, then a step if one is due.

        An error pauses the session and is shown in `message`.
        """
        session = self.session
        try:
            for command in commands:
                session.do(command)
            return self.active and session.wait_seconds() <= 0.0 and session.advance()
        except LabError as error:
            self._failed(str(error))
        except Exception as error:
            traceback.print_exc()
            self._failed(f"{type(error).__name__}: {error}")
            time.sleep(0.05)
        return True

    def _failed(self, message: str) -> None:
        self.session.paused = True
        self.session.message = message
        self.session.changes += 1


# --- Pages ---

MOST_VIEWERS = 64


class Viewer:
    """One open page, with the newest unsent frame and status.

    A slow page skips frames and does not delay others.
    """

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.frame: bytes | None = None
        self.status: str | None = None
        self.pending = asyncio.Event()

    def offer(self, *, frame: bytes | None = None, status: str | None = None) -> None:
        self.frame = frame if frame is not None else self.frame
        self.status = status if status is not None else self.status
        self.pending.set()

    async def write(self) -> None:
        while True:
            await self.pending.wait()
            self.pending.clear()
            status, frame, self.status, self.frame = self.status, self.frame, None, None
            if status is not None:
                await self.socket.send_text(status)
            if frame is not None:
                await self.socket.send_bytes(frame)


class Clients:
    """The open pages of a session; runs in the server's event loop."""

    def __init__(self, session: PlaySession) -> None:
        self.session = session
        self.runner = Runner(session, self._from_thread)
        self.viewers: list[Viewer] = []
        self.driver: Viewer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frame: bytes | None = None
        self._status: dict[str, Any] = {}
        self._sent_changes = -1

    def start(self) -> None:
        """Start the session thread; call it inside the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._status = self._session_status()
        self._frame = encode_frame(self.session)
        self.runner.start()

    async def stop(self) -> None:
        """Stop the session thread, finish an open recording and close the environment."""

        def end() -> None:
            self.runner.stop()
            self.session.close()

        await asyncio.get_running_loop().run_in_executor(None, end)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one page until it closes."""
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
        self._send_status()
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
            self._remove(viewer)
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
                    self._send_status()
                elif isinstance(request, Command) and viewer is self.driver:
                    self.runner.submit(request)

    def _remove(self, viewer: Viewer) -> None:
        self.viewers.remove(viewer)
        if viewer is self.driver:
            self.driver = None
            self.runner.submit(Command("release"))
            self.runner.submit(Command("record", False))
        self.runner.set_active(bool(self.viewers))
        self._send_status()

    def _send_status(self) -> None:
        """Send the status to all pages; only the fields about the controls differ."""
        for viewer in self.viewers:
            mine = {
                "steers": viewer is self.driver,
                "free": self.driver is None,
                "viewers": len(self.viewers),
            }
            viewer.offer(status=json.dumps({**self._status, **mine}))

    def _from_thread(self, session: PlaySession) -> None:
        """Publish a new frame; called in the session thread, which alone may read the session."""
        frame = encode_frame(session)
        status: dict[str, Any] | None = None
        if session.changes != self._sent_changes or session.mode == "episodes":
            self._sent_changes = session.changes
            status = self._session_status()
        self._call(lambda: self._publish(frame, status))

    def _session_status(self) -> dict[str, Any]:
        return {**self.session.status(), "about": {**self.session.sources.about, **legend(self.session)}}

    def _publish(self, frame: bytes, status: dict[str, Any] | None) -> None:
        self._frame = frame
        for viewer in self.viewers:
            viewer.offer(frame=frame)
        if status is not None:
            self._status = status
            self._send_status()

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)
