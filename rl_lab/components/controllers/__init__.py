"""Policies, critics, planners and evolution strategies that a config can name."""
