"""Bandwidth of rails, measured from their traffic, and each rail's share of the traffic."""
