"""Saving and restoring an EpisodeBuffer in a checkpoint.

chunk-00000012.episodes    hard link to the file in the buffer's folder; a copy if it is on another disk
index-00000003.log         index of the episodes at the third save
memory-00000003.pt         rows of the open episodes, and columns that were written back
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.chunk_files import LostFile, find_damaged
from rl_lab.buffers.episodes.reader import WrittenBlocks
from rl_lab.buffers.episodes.recovery import (
    INDEX,
    LARGEST_INDEX,
    check_chunks,
    chunk_files,
    chunk_path,
    recover,
)
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.writer import OpenEpisodes
from rl_lab.buffers.ring import differences
from rl_lab.buffers.row_layout import FORMAT, RowLayout, write_layout
from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import TEMPORARY_SUFFIX, write_atomic
from rl_lab.utils.untrusted import open_regular, read_bytes

KIND = "episodes"


def save(
    folder: Path, store: EpisodeStore, unfinished: OpenEpisodes, written: WrittenBlocks, saves: int
) -> dict[str, Any]:
    """Save the buffer to a checkpoint's folder. returns: {"files": …, "meta": …}, JSON-serializable"""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = store.files()
    for name in chunks:
        link_or_copy(store.folder / name, folder / name)
    index, memory = f"index-{saves:08d}.log", f"memory-{saves:08d}.pt"
    content = {"open": unfinished.get_state(), "written": written.get_state()}
    files = {
        **chunks,
        index: dict(zip(("bytes", "crc32"), store.write_index(folder / index))),
        memory: dict(
            zip(("bytes", "crc32"), write_atomic(folder / memory, lambda f: torch.save(content, f)))
        ),
    }
    meta = {
        "kind": KIND,
        "format": FORMAT,
        "layout": store.layout.to_dict(),
        "streams": unfinished.num_streams,
        "first": store.table.first,
        "end": store.table.end,
        "cursor": unfinished.cursor,
        "rows": store.table.rows,
        "open_rows": int(unfinished.rows().sum()),
        "index": index,
        "memory": memory,
        "saves": saves,
    }
    return {"files": files, "meta": meta}


def check_meta(meta: Mapping[str, Any], layout: RowLayout, num_streams: int) -> None:
    """Raise CheckpointError unless the saved episodes fit the buffer."""
    if meta.get("kind") != KIND:
        raise CheckpointError(
            "buffer: the saved replay is not a buffer of episodes; use the buffer type of the saved run"
        )
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"episode format {meta.get('format')} cannot be read; this version reads {FORMAT}"
        )
    if differ := differences(layout.columns, RowLayout.from_dict(meta["layout"]).columns):
        raise CheckpointError(f"columns of the saved episodes differ: {'; '.join(differ)}")
    if meta["streams"] != num_streams:
        raise CheckpointError(
            f"num_envs: the saved episodes are of {meta['streams']} environments, but this run's config asks for "
            f"{num_streams}: restore the saved value, or start a new run"
        )


def restore(
    folder: Path,
    entry: Mapping[str, Any],
    store: EpisodeStore,
    unfinished: OpenEpisodes,
    written: WrittenBlocks,
    *,
    skip_corrupt: bool,
) -> list[LostFile]:
    """Restore the buffer. Damaged files raise CheckpointError or, with skip_corrupt, are returned."""
    meta, files = entry["meta"], entry["files"]
    check_meta(meta, store.layout, unfinished.num_streams)
    if any(Path(name).name != name for name in files) or not {meta["index"], meta["memory"]} <= set(files):
        raise CheckpointError(
            "list of files of the saved episodes is damaged; resume from another checkpoint"
        )
    damaged = find_damaged(folder, entry, sizes_only=not skip_corrupt)
    if damaged and not skip_corrupt:
        name, reason = next(iter(damaged.items()))
        raise CheckpointError(f"episode file {folder / name} {reason}")
    layout = RowLayout.from_dict(meta["layout"])
    if layout.block_rows != store.layout.block_rows:
        store.layout.block_rows = layout.block_rows
        write_layout(store.folder, store.layout)
    chunks = {name: folder / name for name in files if name.startswith("chunk-")}
    index = None if meta["index"] in damaged else folder / meta["index"]
    lost = replace_files(store, index, chunks, folder)
    numbers = [int(name.split("-")[1].split(".")[0]) for name in damaged if name in chunks]
    present = [number for number in numbers if chunk_path(store.folder, number).exists()]
    check_chunks(store.folder, store.table, present, lost)
    for number in present:
        store.reseal(number)
    first = min(int(meta["first"]), store.table.end)
    while store.table.first < first:  # needed only if the index was lost
        store.table.evict_oldest()
    store.table.skip_to(int(meta["end"]))
    _restore_memory(folder / meta["memory"], meta, unfinished, written, damaged.get(meta["memory"]), lost)
    return lost


def _restore_memory(
    path: Path,
    meta: Mapping[str, Any],
    unfinished: OpenEpisodes,
    written: WrittenBlocks,
    damage: str | None,
    lost: list[LostFile],
) -> None:
    if damage is None:
        content = load_data(path, check_zip=True)
        try:
            unfinished.set_state(content["open"])
            written.set_state(content["written"])
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not hold open episodes ({type(error).__name__}: {error})"
            ) from None
        return
    # One position is skipped, to leave a gap.
    empty = OpenEpisodes(unfinished.layout, unfinished.num_streams, int(meta["cursor"]) + 1)
    unfinished.set_state(empty.get_state())
    written.clear()
    lost.append(LostFile(str(path), int(meta["open_rows"]), damage))


def replace_files(
    store: EpisodeStore, index: Path | None, chunks: Mapping[str, Path], folder: Path
) -> list[LostFile]:
    """Replace the chunks of a store, given by name, and its index (None: it is rebuilt from the chunks).

    Missing files are skipped and returned.
    """
    store.stop_writing()
    store.has_stale_files = False
    # A chunk number that was used in either folder is not used again for other episodes.
    beyond = max([-1, *chunk_files(store.folder), *chunk_files(folder)]) + 1
    for name, source in chunks.items():
        if source.exists():
            link_or_copy(source, store.folder / name)
    content = b"" if index is None else read_bytes(index, LARGEST_INDEX)
    write_atomic(store.folder / INDEX, lambda file: file.write(content))
    for path in chunk_files(store.folder).values():
        if path.name not in chunks:
            path.unlink()
    store.load(recover(store.folder), quiet=True)
    store.next_chunk = max(store.next_chunk, beyond)
    return store.lost


def fingerprint(store: EpisodeStore) -> str:
    """Return a hash of the stored episodes."""
    facts = hashlib.blake2b(digest_size=16)
    for name in ("stream", "start", "rows", "size", "reward"):
        facts.update(store.table.column(name).tobytes())
    return facts.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link atomically, or a copy if the target is on another disk."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:  # on another disk, or hard links are not supported
        with open_regular(source) as file:
            write_atomic(target, lambda copy: shutil.copyfileobj(file, copy, 1 << 20))
