"""Ways to move a slice: `base` is the interface, beside it an implementation a package."""
