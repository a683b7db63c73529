"""Fused pieces of networks: each a plain torch function that says what it does, and a Triton kernel that does it fast."""
