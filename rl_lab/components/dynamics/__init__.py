"""Models of how latent states change: MLPs, the MDN-RNN, token world models and their backbones."""
