"""From the command line to one config: composing, checking, saving, several runs."""
