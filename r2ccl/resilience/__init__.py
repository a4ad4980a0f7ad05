"""Surviving failures: tables fed with events and answering with actions; no I/O in this room.

`link` numbers slices and decides what is replayed, `path` when a path may be used, `watch` when
silence becomes suspicion. `inquiry` finds out what broke and `verdict` names it; `quarantine` says
when a path may come back, `bandwidth` what a rail carries. `agreement` has all ranks plan from one
`health`, in the rounds of `rounds`; `quorum` and `shrinking` say who goes on after deaths. None of
them sees a socket, a thread or a clock.
"""
