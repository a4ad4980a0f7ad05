"""Execution of collectives and messages: argument checks, the data loop, the progress of slices.

All collectives start in `collectives`, which runs a collective on host memory, and passes a
collective on device memory to `r2ccl.gpu`. Messages start in `messaging`. `progress` is the data
loop. `data_loop` decides which thread runs the data loop, `engine` runs the calls of one
communicator in it, and `executor` runs the steps of a plan.
"""
