"""Table of the rails that are down or slow, and the agreement on which collective first uses it."""
