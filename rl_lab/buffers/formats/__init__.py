"""Data formats of stored episodes."""
