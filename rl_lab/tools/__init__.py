"""The verbs of the command line (rl_lab/cli.py names their modules), and what they share."""
