"""Carries calls out: arguments are checked, the data loop is taken, slices move.

`collectives` is where a call on host memory enters. `engine` says who may run the data loop,
`progress` is that loop, and `executor` walks a plan through it.
"""
