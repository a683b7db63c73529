"""Split the weights of a checkpoint into files of a limited size, and join them.

python scripts/split_weights.py split RUN_OR_CHECKPOINT FOLDER [--limit 15]
python scripts/split_weights.py join FOLDER FILE.pt

Only components and controllers are kept, which `load.path=FILE.pt` reads. The values are exact.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import LabError
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION

GROUPS = ("components", "controllers")
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("source", type=Path, help="a run folder, or a checkpoint file")
    one.add_argument("folder", type=Path)
    one.add_argument("--limit", type=float, default=15.0, help="MiB per file")
    other = commands.add_parser("join")
    other.add_argument("folder", type=Path)
    other.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        files = (
            split(args.source, args.folder, args.limit)
            if args.command == "split"
            else [join(args.folder, args.file)]
        )
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for file in files:
        print(f"{file}  {file.stat().st_size / MIB:.1f} MiB")
    return 0


def split(source: Path, folder: Path, limit: float) -> list[Path]:
    """Write the tensors to numbered files of at most the limit each."""
    state = CheckpointManager.load_file(source, weights=True).state
    tensors = [
        ((group, part, key), value.cpu().contiguous())
        for group in GROUPS
        for part, weights in state[group].items()
        for key, value in weights.items()
    ]
    parts: list[list[Any]] = [[]]
    bytes_left = limit * MIB
    for name, value in tensors:
        if value.nbytes > bytes_left and parts[-1]:
            parts.append([])
            bytes_left = limit * MIB
        bytes_left -= value.nbytes
        parts[-1].append((name, value))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, part in enumerate(parts):
        files.append(folder / f"weights_{number}.pt")
        tree = {"global_step": int(state["global_step"]), "part": number, "parts": len(parts)}
        torch.save({**tree, "tensors": {"/".join(name): value for name, value in part}}, files[-1])
    return files


def join(folder: Path, file: Path) -> Path:
    """Write one file with all weights."""
    parts = [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights_*.pt"))]
    if not parts or len(parts) != parts[0]["parts"]:
        raise LabError(f"{folder} has {len(parts)} weights_*.pt files: all parts of one split are required")
    state: dict[str, Any] = {"version": CHECKPOINT_VERSION, "global_step": parts[0]["global_step"]}
    for part in parts:
        for name, value in part["tensors"].items():
            group, module, key = name.split("/", 2)
            state.setdefault(group, {}).setdefault(module, {})[key] = value
    torch.save(state, file)
    return file


if __name__ == "__main__":
    sys.exit(main())
