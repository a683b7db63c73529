"""Where processes run: rank, world size, device."""
