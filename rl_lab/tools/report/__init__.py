"""`rl-lab report`: curves, scores and media of runs as PNG and HTML."""

from rl_lab.tools.report.command import add_arguments, main

__all__ = ["add_arguments", "main"]
