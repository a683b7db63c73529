"""Composes, checks and compares configs, and runs sweeps."""
