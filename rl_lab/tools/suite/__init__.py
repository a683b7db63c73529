"""`rl-lab suite`: a benchmark of several tasks and seeds by one command, continued from its results folder."""
