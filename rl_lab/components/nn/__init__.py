"""Layers, losses and optimizers that several algorithms share."""
