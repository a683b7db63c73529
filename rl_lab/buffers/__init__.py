"""Stored experience: rings of rows, how sequences are drawn from them, and doors into them."""
