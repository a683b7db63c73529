"""Replay: rows in memory or on disk, samplers, batches, stored data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.buffers.batches import BatchStream
    from rl_lab.buffers.episodes import EpisodeBuffer, StoredEpisodes
    from rl_lab.buffers.mix import BufferMix
    from rl_lab.buffers.offline import OfflineBuffer
    from rl_lab.buffers.prioritized import PrioritizedReplay
    from rl_lab.buffers.replay import ReplayBuffer

__all__ = [
    "BatchStream",
    "BufferMix",
    "EpisodeBuffer",
    "OfflineBuffer",
    "PrioritizedReplay",
    "ReplayBuffer",
    "StoredEpisodes",
]

_MODULES = {
    "BatchStream": "rl_lab.buffers.batches",
    "BufferMix": "rl_lab.buffers.mix",
    "EpisodeBuffer": "rl_lab.buffers.episodes",
    "OfflineBuffer": "rl_lab.buffers.offline",
    "PrioritizedReplay": "rl_lab.buffers.prioritized",
    "ReplayBuffer": "rl_lab.buffers.replay",
    "StoredEpisodes": "rl_lab.buffers.episodes",
}
__getattr__ = lazy_exports(__name__, _MODULES)
