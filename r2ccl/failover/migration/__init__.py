"""A failed path's slices move to another: roll back, choose a path, replay.

`link` numbers slices and decides what is replayed, `path` when a path may be used.
"""
