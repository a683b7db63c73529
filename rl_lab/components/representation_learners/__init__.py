"""Encoders, decoders, tokenizers and the RSSM: from observations to latent states and back."""
