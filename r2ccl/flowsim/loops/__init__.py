"""Event loops of the simulator, compiled with Numba.

The loops work only on the flat arrays of a `FlowState`, not on a `Schedule` or a `Network`.
"""
