"""What goes over the WebSocket. To the page: frames (binary) and status (JSON). From it: requests (JSON).

A frame is a little-endian uint32 n, n bytes of JSON {"panels": [{title, width, height, type, bytes}], "header": [[name,
value], …], "step", "ack", "done", "numbers"}, then the pictures one behind the other.
"""

from __future__ import annotations

import io
import json
import math
import struct
from typing import Any

import numpy as np

from rl_lab.tools.play.commands import Command, parse_command
from rl_lab.tools.play.session import PlaySession

SMALL = 128 * 128  # pixels up to which a picture is sent without loss
LARGEST_MESSAGE = 4096  # bytes of a request


def encode_frame(session: PlaySession) -> bytes:
    """The session's present as one message."""
    pictures, panels = [], []
    for title, image in session.panels():
        kind, data = encode_picture(image)
        pictures.append(data)
        height, width = image.shape[:2]
        panels.append({"title": title, "width": width, "height": height, "type": kind, "bytes": len(data)})
    moment = session.moment
    numbers = {"reward": moment.reward, **session.numbers, **moment.extra}
    head = {
        "panels": panels,
        "header": session.header(),
        "step": session.step,
        "ack": session.acknowledged,
        "done": moment.done,
        "numbers": {name: value for name, value in numbers.items() if math.isfinite(value)},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *pictures])


def decode_frame(message: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """A frame's head and its pictures."""
    (size,) = struct.unpack_from("<I", message)
    head = json.loads(message[4 : 4 + size])
    pictures, at = [], 4 + size
    for panel in head["panels"]:
        pictures.append(message[at : at + panel["bytes"]])
        at += panel["bytes"]
    return head, pictures


def encode_picture(image: np.ndarray) -> tuple[str, bytes]:
    """Media type and bytes: PNG for small pictures, whose pixels people count; JPEG for large ones."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(image))
    if image.shape[0] * image.shape[1] <= SMALL:
        picture.save(buffer, format="PNG", compress_level=1)
        return "image/png", buffer.getvalue()
    picture.save(buffer, format="JPEG", quality=90)
    return "image/jpeg", buffer.getvalue()


def decode_request(text: str | bytes | None) -> Command | str | None:
    """A request of a page: a Command, "take" (the controls), or None for whatever is none."""
    if not isinstance(text, str) or len(text) > LARGEST_MESSAGE:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if message == {"do": "take"}:
        return "take"
    return parse_command(message)
