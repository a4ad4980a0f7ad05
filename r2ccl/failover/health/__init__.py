"""Table of NICs that are down or slow, and the agreement on which collective first uses it."""
