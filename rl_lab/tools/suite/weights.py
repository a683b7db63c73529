"""Weights of a finished run as bfloat16 in files of a limited size, and back to one file for `load.path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_lab.errors import LabError
from rl_lab.utils.files import write_atomic

GROUPS = ("components", "controllers")
PART_MIB = 15.0
MIB = 2**20
OVERHEAD = 16 * 1024  # bytes of a file that are not tensors, with room to spare


def export_weights(source: Path, folder: Path, limit: float = PART_MIB) -> list[Path]:
    """Write the weights of a run's last checkpoint to numbered files of at most `limit` MiB each.

    Floating-point tensors become bfloat16. A tensor that is larger than the limit is cut into pieces.
    """
    import torch

    from rl_lab.utils.checkpoint.manager import CheckpointManager

    state = CheckpointManager.load_file(source, weights=True).state
    budget = int(limit * MIB) - OVERHEAD
    if budget < MIB // 4:
        raise LabError(f"limit must be at least 0.3 MiB, not {limit:g}")
    parts: list[list[tuple[str, Any]]] = [[]]
    left = budget
    for group in GROUPS:
        for part, tensors in state[group].items():
            for key, value in tensors.items():
                kept = value.to(torch.bfloat16) if value.is_floating_point() else value
                for name, piece in _pieces(f"{group}/{part}/{key}", kept.cpu().contiguous(), budget):
                    size = piece.nbytes + 512  # an entry's header
                    if size > left and parts[-1]:
                        parts.append([])
                        left = budget
                    left -= size
                    parts[-1].append((name, piece))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights_*.pt"):
        old.unlink()
    files = []
    for number, items in enumerate(parts):
        content: dict[str, Any] = {
            "global_step": int(state["global_step"]),
            "part": number,
            "parts": len(parts),
            "tensors": dict(items),
        }
        files.append(folder / f"weights_{number}.pt")
        write_atomic(files[-1], lambda file, content=content: torch.save(content, file))  # type: ignore[misc]
    return files


def join_weights(folder: Path, file: Path) -> Path:
    """Write one float32 file from the parts, which `load.path` and `rl-lab eval` can read."""
    import torch

    from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION

    parts = [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights_*.pt"))]
    if not parts or len(parts) != parts[0]["parts"]:
        raise LabError(f"{folder} has {len(parts)} weights_*.pt files: all parts of one export are required")
    parts.sort(key=lambda part: int(part["part"]))
    pieces: dict[str, list[Any]] = {}
    shapes: dict[str, list[int]] = {}
    for part in parts:
        for name, value in part["tensors"].items():
            whole, _, rest = name.partition("#")
            if rest:  # "<number>:<shape>"
                shapes[whole] = [int(size) for size in rest.partition(":")[2].split(",")]
            pieces.setdefault(whole, []).append(value)
    state: dict[str, Any] = {"version": CHECKPOINT_VERSION, "global_step": parts[0]["global_step"]}
    for name, values in pieces.items():
        value = torch.cat(values).view(shapes[name]) if name in shapes else values[0]
        group, module, key = name.split("/", 2)
        stored = value.float() if value.is_floating_point() else value
        state.setdefault(group, {}).setdefault(module, {})[key] = stored
    write_atomic(file, lambda opened: torch.save(state, opened))
    return file


def _pieces(name: str, value: Any, budget: int) -> list[tuple[str, Any]]:
    """Return a tensor under its name, or flat pieces as "<name>#<number>:<shape>" if it is too large."""
    if value.nbytes + 512 <= budget:
        return [(name, value.clone())]  # a view would store its complete storage
    shape = ",".join(map(str, value.shape))
    flat = value.view(-1)
    length = (budget - 512) // value.element_size()
    return [
        (f"{name}#{number}:{shape}", flat[start : start + length].clone())
        for number, start in enumerate(range(0, len(flat), length))
    ]
