"""Moves the slices of a failed path to other paths: fence, choose a route, replay.

`link` numbers slices and decides which are replayed; `path` holds the state machine of a path.
"""
