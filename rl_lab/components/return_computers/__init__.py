"""Computation of returns from rewards, continuation flags and values."""
