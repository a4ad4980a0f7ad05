"""Surviving failures: tables fed with events and answering with actions; no I/O in this room.

`link` numbers slices and decides what is replayed, `path` decides when a path may be used,
`watch` decides when silence becomes suspicion. None of them sees a socket, a thread or a clock.
"""
