"""Episodes on disk, for data that does not fit into memory."""

from rl_lab.buffers.episodes.buffer import EpisodeBuffer, StoredEpisodes

__all__ = ["EpisodeBuffer", "StoredEpisodes"]
