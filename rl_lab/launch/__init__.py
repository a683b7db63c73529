"""Device of a process."""
