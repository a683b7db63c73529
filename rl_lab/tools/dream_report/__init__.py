"""`rl-lab report --dream`: how far a world model can be trusted."""
