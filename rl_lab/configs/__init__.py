"""The shipped configs. A package, so that Hydra finds them inside a wheel."""
