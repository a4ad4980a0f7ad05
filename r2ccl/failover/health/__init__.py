"""One table of NICs that are down or slow, and the agreement from which call on it holds."""
