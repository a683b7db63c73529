"""The verbs of the command line: each a module with `add_arguments(parser)` and `main(args)`."""
