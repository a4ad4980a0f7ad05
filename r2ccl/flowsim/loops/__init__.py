"""The simulator's inner loops, compiled: what happens next, and what that makes possible.

Imports NumPy and Numba, and nothing of the library but itself. Invariant: loops see a `State` and
numbers, no schedule and no network.
"""
