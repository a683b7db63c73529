"""`rl-lab collect`: store episodes of an agent, an expert, the random policy or a person as a data set."""
