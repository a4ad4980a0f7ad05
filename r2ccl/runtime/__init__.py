"""Execution of collective calls: argument checks, the data loop, and the progress of slices.

A call on host memory enters in `collectives`. `engine` decides which thread runs the data loop,
`progress` is that loop, and `executor` runs the steps of a plan in it.
"""
