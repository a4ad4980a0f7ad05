"""Ways to move a slice: `base` is the interface, one file an implementation beside it."""
