"""Saving, loading and deleting checkpoints, which are data only (`torch.load(weights_only=True)`)."""

from rl_lab.utils.checkpoint.loading import Loaded, load_checkpoint, restore_buffers
from rl_lab.utils.checkpoint.manager import WEIGHT_KEYS, CheckpointManager
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, MIGRATIONS
from rl_lab.utils.checkpoint.matching import load_matching, partial_load
from rl_lab.utils.checkpoint.saveable import to_saveable

__all__ = [
    "CHECKPOINT_VERSION",
    "MIGRATIONS",
    "WEIGHT_KEYS",
    "CheckpointManager",
    "Loaded",
    "load_checkpoint",
    "load_matching",
    "partial_load",
    "restore_buffers",
    "to_saveable",
]
