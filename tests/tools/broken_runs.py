"""Run folders that a report cannot read, each for another reason."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

BREAKAGES = ("empty config", "broken YAML", "endless steps", "huge number")


def break_run(folder: Path, how: str) -> str:
    """Make a run unreadable; returns a part of the expected message."""
    if how == "empty config":
        (folder / "config.yaml").write_text("")
        return "config.yaml contains no config"
    if how == "broken YAML":
        (folder / "config.yaml").write_text("a: [1\n")
        return "config.yaml cannot be read as YAML"
    if how == "endless steps":
        (folder / "config.yaml").write_text("training: {total_timesteps: .nan}\n")
        return "config.yaml has training.total_timesteps: nan"
    if how == "huge number":
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {10**400}}}\n')
        return "cannot be plotted: OverflowError"
    raise ValueError(how)


def write_huge_png(path: Path) -> Path:
    """A header that promises 60,000 × 60,000 pixels, and hardly any data."""
    content = b"\x89PNG\r\n\x1a\n"
    sizes = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    for name, data in ((b"IHDR", sizes), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(content)
    return path


def write_short_metrics(folder: Path) -> Path:
    """Few metrics: a page that is drawn in a fraction of a second."""
    rows = [{"step": step, "collect/return_mean": float(step), "train/loss": 1.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
