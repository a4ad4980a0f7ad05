"""Bandwidth of rails, measured from their traffic, and the weight of each rail in plans."""
