"""Cut a run, or its weights, into files of a limited size, and join them on another machine.

python scripts/split_run.py split RUN FOLDER               what resuming needs: config, checkpoint, replay, metrics
python scripts/split_run.py split RUN FOLDER --weights     components and controllers alone, for `load.path`
python scripts/split_run.py join FOLDER RUN                a run folder: `rl-lab resume RUN` continues it, bit for bit
python scripts/split_run.py join FOLDER RUN --newer        does nothing if RUN is as far; replaces it if it is not
python scripts/split_run.py join FOLDER FILE.pt            weights

FOLDER gets part_000.bin, part_001.bin, … and parts.json with sizes and checksums, which is written last. The parts are
the bytes of the files one after the other. Split a run that has stopped. `--limit` is the size of a part in MiB (15).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_lab.errors import LabError
from rl_lab.utils.checkpoint.loading import load_checkpoint, manifest_step, manifests, named_replay
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, read_manifest
from rl_lab.utils.files import LOCK_NAME, crc32_of, inside, is_locked, read_json, write_json_atomic

MIB = 2**20
BLOCK = MIB
FORMAT = 1
PARTS = "parts.json"
GROUPS = ("components", "controllers")
NOT_NEEDED = ("media", "tensorboard", "report", "profile", "checkpoints")  # checkpoints: only the newest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("source", type=Path, help="a run folder; with --weights also a checkpoint file")
    one.add_argument("folder", type=Path)
    one.add_argument("--weights", action="store_true", help="components and controllers alone")
    one.add_argument("--limit", type=float, default=15.0, help="MiB per file")
    other = commands.add_parser("join")
    other.add_argument("folder", type=Path)
    other.add_argument("target", type=Path, help="a new run folder, or a file for weights")
    other.add_argument("--newer", action="store_true", help="replace the target if it is not as far")
    args = parser.parse_args(arguments)
    try:
        if args.command == "split":
            files = (split_weights if args.weights else split_run)(args.source, args.folder, args.limit)
            for file in files:
                print(f"{file}  {file.stat().st_size / MIB:.1f} MiB")
        else:
            print(join(args.folder, args.target, newer=args.newer))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


# --- Split ---


def split_run(run: Path, folder: Path, limit: float = 15.0) -> list[Path]:
    """Write the files that resuming a stopped run needs, as parts of at most `limit` MiB; return the parts."""
    run = run.resolve()  # as the paths of its checkpoints are
    if is_locked(run):
        raise LabError(f"{run} is in use by a process: stop it before the run is split")
    if not (run / "config.yaml").is_file():
        raise LabError(f"{run} has no config.yaml: give the folder of a run")
    loaded = load_checkpoint(run, on_damaged_replay="stop")  # checks state and replay
    return _write_parts(_needed(run, loaded.path), folder, limit, {"kind": "run", "step": loaded.step})


def split_weights(source: Path, folder: Path, limit: float = 15.0) -> list[Path]:
    """Write the weights of a run's newest checkpoint, or of a checkpoint file; the values are exact."""
    import torch

    state = load_checkpoint(source, weights=True).state
    kept: dict[str, Any] = {"version": CHECKPOINT_VERSION, "global_step": int(state["global_step"])}
    for group in GROUPS:
        kept[group] = {
            part: {key: value.cpu().contiguous() for key, value in tensors.items()}
            for part, tensors in state[group].items()
        }
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "weights.pt"
        torch.save(kept, file)
        return _write_parts(
            {file.name: file}, folder, limit, {"kind": "weights", "step": kept["global_step"]}
        )


def _needed(run: Path, state: Path) -> dict[str, Path]:
    """Return path in the run -> file, for all files that resuming from this state needs."""
    checkpoints = run / "checkpoints"
    files = [
        path
        for path in sorted(run.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and path.relative_to(run).parts[0] not in NOT_NEEDED
        and path.name != LOCK_NAME
    ]
    newest = next(path for path in manifests(checkpoints) if _state_file(path) == state.name)
    files += [newest, state, *sorted(named_replay(checkpoints, read_manifest(newest)))]
    best = checkpoints / "best.json"
    if best.is_file():
        files += [best, checkpoints / _state_file(best)]
    return {path.relative_to(run).as_posix(): path for path in files}


def _state_file(manifest: Path) -> str:
    return str(read_manifest(manifest)["state"]["file"])


def _write_parts(
    files: Mapping[str, Path], folder: Path, limit: float, facts: Mapping[str, Any]
) -> list[Path]:
    size = int(limit * MIB)
    if size < 1:
        raise LabError(f"--limit must be above 0, not {limit:g}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PARTS).unlink(missing_ok=True)  # an interrupted split leaves none
    for old in folder.glob("part_*.bin"):
        old.unlink()
    entries = [
        {"path": name, "bytes": file.stat().st_size, "crc32": crc32_of(file)} for name, file in files.items()
    ]
    blocks = (block for file in files.values() for block in _blocks(file))
    parts: list[Path] = []
    rest = next(blocks, b"")
    while rest:
        parts.append(folder / f"part_{len(parts):03d}.bin")
        left = size
        with open(parts[-1], "wb") as part:
            while left and rest:
                part.write(rest[:left])
                rest, left = rest[left:], left - min(left, len(rest))
                rest = rest or next(blocks, b"")
    listed = [{"file": file.name, "bytes": file.stat().st_size, "crc32": crc32_of(file)} for file in parts]
    write_json_atomic(folder / PARTS, {"format": FORMAT, **facts, "files": entries, "parts": listed})
    return parts


def _blocks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as opened:
        while block := opened.read(BLOCK):
            yield block


# --- Join ---


def join(folder: Path, target: Path, *, newer: bool = False) -> str:
    """Write the run folder, or the file of weights, from its parts; return one line about it."""
    content = _read_parts(folder)
    if target.exists() and not newer:
        raise LabError(f"{target} exists: choose another name, or pass --newer")
    if content["kind"] == "run" and target.exists():
        here = max(map(manifest_step, manifests(target / "checkpoints")), default=-1)
        if is_locked(target):
            raise LabError(f"{target} is in use by a process: stop it before it is replaced")
        if here >= content["step"]:
            return f"{target} is at step {here:,}, the parts at {content['step']:,}: nothing to do"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".joining_") as temporary:
        made = Path(temporary) / "joined"
        _write_files(content, folder, made)
        if content["kind"] == "weights":
            (entry,) = content["files"]
            os.replace(inside(made, entry["path"]), target)
        else:
            if target.exists():
                target.rename(Path(temporary) / "before")
            os.replace(made, target)
    return f"{target} has the {content['kind']} of step {content['step']:,}"


def _read_parts(folder: Path) -> dict[str, Any]:
    """Read parts.json and check that every part is there and intact."""
    file = folder / PARTS
    if not file.is_file():
        raise LabError(f"{folder} has no {PARTS}: give the folder that split wrote, with all of its files")
    content = read_json(file)
    try:
        if content["format"] != FORMAT or content["kind"] not in ("run", "weights"):
            raise LabError(f"{file} has format {content['format']} and kind {content['kind']}: update rl-lab")
        int(content["step"])
        for part in content["parts"]:
            path = inside(folder, part["file"])
            if not path.is_file():
                raise LabError(f"{path} is missing: copy all parts")
            if path.stat().st_size != part["bytes"] or crc32_of(path) != part["crc32"]:
                raise LabError(f"{path} is damaged: it is not the part that was written")
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{file} is not a list of parts ({error!r})") from None
    return dict(content)


def _write_files(content: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Write the files below `target`, and check their sizes and checksums."""
    stream = (block for part in content["parts"] for block in _blocks(inside(folder, part["file"])))
    rest = b""
    target.mkdir()
    for entry in content["files"]:
        path = inside(target, entry["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        left, checksum = int(entry["bytes"]), 0
        with open(path, "wb") as file:
            while left:
                rest = rest or next(stream, b"")
                if not rest:
                    raise LabError(f"{folder}: the parts end before {entry['path']} does")
                file.write(rest[:left])
                checksum = zlib.crc32(rest[:left], checksum)
                rest, left = rest[left:], left - min(left, len(rest))
        if checksum != entry["crc32"]:
            raise LabError(f"{folder}: {entry['path']} is not what was split")
        if path.parent == target / "scripts":
            path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
