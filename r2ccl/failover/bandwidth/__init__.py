"""Rates of rails, measured from the slices they carry, and the shares of work that follow."""
