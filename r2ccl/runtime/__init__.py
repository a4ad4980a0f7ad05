"""Execution of collectives and messages: argument checks, the data loop, the progress of slices.

All collectives start in `collectives`. Collectives on host memory run in `host_collectives`, and
collectives on device memory in `r2ccl.gpu`. Messages start in `messaging`. `progress` is the data
loop. `data_loop` decides which thread runs it, `engine` runs the calls of one communicator in it,
and `executor` runs the steps of a plan.
"""
