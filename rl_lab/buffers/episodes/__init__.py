"""Episodes on disk, for more data than memory holds."""

from rl_lab.buffers.episodes.buffer import EpisodeBuffer, StoredEpisodes

__all__ = ["EpisodeBuffer", "StoredEpisodes"]
