"""Event loops of the simulator, compiled with Numba.

They work on the flat arrays of a `FlowState` only, not on a `Schedule` or a `Network`.
"""
