"""Checkpoints, logging, seeds and files: nothing with RL meaning."""
