"""The commands of the command line (rl_lab/cli.py names their modules) and their shared code."""
