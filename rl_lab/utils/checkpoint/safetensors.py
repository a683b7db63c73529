"""Weights as one .safetensors file: the tensors of a state, and its plain values in the file's metadata.

The format is that of the `safetensors` package: the length of the header (8 bytes, little-endian), the header in JSON
(name -> dtype, shape, first and last byte), then the bytes of all tensors without gaps. Such a file holds numbers
only. Reading it needs no other package and runs no code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import CheckpointError, require_choice
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, migrate
from rl_lab.utils.checkpoint.saveable import to_saveable
from rl_lab.utils.files import json_safe, write_atomic
from rl_lab.utils.untrusted import OddFileError, open_regular

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 64 << 20  # bytes
PLAIN = "rl_lab"  # the metadata entry with all that is no tensor
TENSOR = "$tensor"  # stands for a tensor in it
WEIGHTS = ("components", "controllers")  # parts of a state that may be rounded
PRECISIONS = ("float32", "bfloat16")


def write_state(path: Path, state: Mapping[str, Any], info: Mapping[str, Any], dtype: str = "float32") -> int:
    """Write the state of a checkpoint; return the file's size in bytes.

    dtype: bfloat16 rounds the float32 weights of the parts, which halves the file.
    """
    require_choice("dtype", dtype, PRECISIONS)
    tensors: dict[str, torch.Tensor] = {}
    plain = _split(to_saveable(dict(state)), "", tensors)
    if dtype == "bfloat16":
        for name, tensor in tensors.items():
            if name.split(".")[0] in WEIGHTS and tensor.dtype == torch.float32:
                tensors[name] = tensor.to(torch.bfloat16)
    text = json.dumps({"state": plain, "info": json_safe(info), "dtype": dtype}, separators=(",", ":"))
    write_tensors(path, tensors, {"format": "pt", PLAIN: text})
    return path.stat().st_size


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return state and info of a file of `write_state`; weights in bfloat16 become float32 again."""
    tensors, metadata = read_tensors(path)
    try:
        content = json.loads(metadata[PLAIN])
        if content["dtype"] == "bfloat16":
            tensors = {
                name: value.float() if value.dtype == torch.bfloat16 else value
                for name, value in tensors.items()
            }
        state, info = _join(content["state"], tensors), content["info"]
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has weights, but was not written by rl-lab export ({error!r})"
        ) from None
    if not isinstance(state, dict) or not isinstance(info, dict):
        raise CheckpointError(f"{path} is damaged: its state is a {type(state).__name__}")
    state.setdefault("version", CHECKPOINT_VERSION)
    return migrate(state, path), info


def _split(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Replace tensors by references; `tensors` gets them by their dotted path."""
    if isinstance(node, torch.Tensor):
        tensors[path] = node
        return {TENSOR: path}
    if isinstance(node, Mapping):
        odd = [key for key in node if not isinstance(key, str) or key == TENSOR]
        if odd:
            raise CheckpointError(f"'{path}' has the key {odd[0]!r}: only text can be exported as a key")
        return {key: _split(value, f"{path}.{key}" if path else key, tensors) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_split(value, f"{path}.{index}", tensors) for index, value in enumerate(node)]
    if node is None or isinstance(node, bool | int | float | str):
        return json_safe(node)
    raise CheckpointError(
        f"'{path}' ({type(node).__name__}) cannot be exported: it is no number, text or tensor"
    )


def _join(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, dict):
        if set(node) == {TENSOR}:
            return tensors[node[TENSOR]]
        return {key: _join(value, tensors) for key, value in node.items()}
    return [_join(value, tensors) for value in node] if isinstance(node, list) else node


# --- The format ---


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    # Wide types first: every tensor then starts at a multiple of its own size.
    order = sorted(data, key=lambda name: (-data[name].element_size(), name))
    for name in order:
        tensor = data[name]
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"'{name}' has the type {tensor.dtype}, which safetensors files do not have"
            )
        first, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [len(text).to_bytes(8, "little"), text]
    parts += [data[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in order]
    write_atomic(path, lambda file: file.write(b"".join(parts)))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return all tensors and the metadata; CheckpointError for a file that is not what its header says."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise ValueError(f"its header has {length:,} of {size:,} bytes")
            header = json.loads(file.read(length))
            entries = _checked(header, size - 8 - length)
            data = bytearray(file.read(size - 8 - length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, OddFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error})") from None
    tensors = {}
    for name, (dtype, shape, first, last) in entries.items():
        if first == last:
            tensors[name] = torch.zeros(shape, dtype=dtype)
            continue
        part = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=first).clone()
        tensors[name] = part.view(dtype).reshape(shape)
    return tensors, header.get("__metadata__", {})


def _checked(header: Any, size: int) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Check that the tensors lie one behind the other and fill the file."""
    metadata = header.get("__metadata__", {})
    if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("its metadata are not text")
    entries = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
            raise ValueError(f"'{name}' has a size that is no positive number")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"'{name}' has {last - first} bytes, but not its shape")
        entries[name] = (dtype, shape, first, last)
    end = 0
    for _, _, first, last in sorted(entries.values(), key=lambda entry: entry[2:]):
        if first != end:
            raise ValueError("its tensors overlap or have gaps")
        end = last
    if end != size:
        raise ValueError(f"it has {size:,} bytes of tensors instead of {end:,}")
    return entries
