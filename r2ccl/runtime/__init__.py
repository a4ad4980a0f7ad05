"""Execution of collective calls: argument checks, the data loop, and the progress of slices.

All calls start in `collectives`, which runs those on host memory and passes those on device memory
to `r2ccl.gpu`. `engine` decides which thread runs the data loop, `progress` is that loop, and
`executor` runs the steps of a plan in it.
"""
