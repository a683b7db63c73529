"""`rl-lab sweep`: search hyperparameters with Optuna."""
