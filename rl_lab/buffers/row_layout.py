"""RowLayout: the columns of a row as bytes in a stored block, and the layout file of a folder of episodes.

A block holds consecutive rows of one episode, one column after the other. It is the unit of compression,
checksums, reads and caching: small enough that a short sequence does not decompress a long episode, large
enough to compress well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.ring import row_bytes, torch_dtype
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.files import read_json, write_json_atomic

BLOCK_BYTES = 1 << 14
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 16, 4096  # per block

LAYOUT = "layout.json"  # file in a folder of episodes
FORMAT = 1

Bytes = dict[str, np.ndarray]  # column -> (rows, bytes per row) uint8


class RowLayout:
    """The columns of a row as bytes.

    block_rows: rows per block; None: about 16 kB, at least 16 rows
    action:     the environment's action space as ActionSpec.to_dict gives it, if known
    """

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        block_rows: int | None = None,
        action: Mapping[str, Any] | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.action = dict(action or {})
        self.widths = {name: row_bytes(spec) for name, spec in columns.items()}
        empty = next((name for name, width in self.widths.items() if not width), None)
        if empty is not None:
            raise ConfigError(f"column '{empty}' of shape {columns[empty].shape} has no elements; remove it")
        self.row_bytes = sum(self.widths.values())
        self.block_rows = block_rows or min(
            MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, BLOCK_BYTES // self.row_bytes)
        )

    def blocks(self, rows: int) -> int:
        """Return the number of blocks of an episode."""
        return -(-rows // self.block_rows)

    def rows_in(self, block: int, rows: int) -> int:
        """Return the number of rows of a block, in an episode of `rows` rows."""
        return min(self.block_rows, rows - block * self.block_rows)

    def pack(self, rows: Bytes, begin: int, end: int) -> bytes:
        return b"".join(rows[name][begin:end].tobytes() for name in self.columns)

    def unpack(self, data: bytes, rows: int) -> Bytes:
        """Return read-only views of the block's memory."""
        found, offset = {}, 0
        for name, width in self.widths.items():
            found[name] = np.frombuffer(data, np.uint8, rows * width, offset).reshape(rows, width)
            offset += rows * width
        return found

    def as_bytes(self, name: str, tensor: torch.Tensor, lead: int) -> np.ndarray:
        """Return a host tensor (…, *shape) with `lead` leading dimensions as (…, bytes), a view if it can."""
        tensor = tensor.to(torch_dtype(self.columns[name].dtype)).contiguous()
        return tensor.reshape(*tensor.shape[:lead], -1).view(torch.uint8).numpy()

    def as_tensor(self, name: str, rows: np.ndarray) -> torch.Tensor:
        """Return (…, bytes) as (…, *shape), without a copy."""
        spec = self.columns[name]
        tensor = torch.from_numpy(rows).view(torch_dtype(spec.dtype))
        return tensor.reshape(*rows.shape[:-1], *spec.shape)

    def to_dict(self) -> dict[str, Any]:
        columns = {name: spec.to_dict() for name, spec in self.columns.items()}
        return {"columns": columns, "block_rows": self.block_rows, "action": self.action}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowLayout:
        columns = {str(name): ArraySpec.from_dict(spec) for name, spec in data["columns"].items()}
        return cls(columns, int(data["block_rows"]), dict(data.get("action") or {}))


def check_row(layout: RowLayout, spec: Spec, columns: Mapping[str, ArraySpec], where: Path) -> list[str]:
    """Raise ConfigError unless the stored rows fit the environment; return `columns` stored differently."""
    for name, wanted in spec.row_columns().items():
        have = layout.columns.get(name)
        if name in columns and have != wanted:
            there = f"{have.dtype} {have.shape}" if have else "absent"
            raise ConfigError(
                f"'{name}' is {there} in {where}, but {wanted.dtype} {wanted.shape} in {spec.name}: use data of "
                "the same environment"
            )
    if layout.action and layout.action != spec.action.to_dict():
        raise ConfigError(
            f"actions are {layout.action} in {where}, but {spec.action.to_dict()} in {spec.name}: use data of the same "
            "environment"
        )
    return [name for name in columns if layout.columns.get(name) != columns[name]]


def write_layout(folder: Path, layout: RowLayout) -> None:
    content = {"format": FORMAT, **layout.to_dict()}
    write_json_atomic(folder / LAYOUT, {**content, "check": _check(content)})


def read_layout(folder: Path) -> RowLayout:
    """Read the layout file of a folder of episodes."""
    path = folder / LAYOUT
    try:
        content = read_json(path)
        check, version = content.pop("check", None), content.get("format")
        layout = RowLayout.from_dict(content)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): it is damaged or not a layout file") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, but this version reads {FORMAT}")
    if check != _check(content):
        raise ConfigError(f"{path} cannot be read: its content does not match its checksum")
    return layout


def _check(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
