"""Execution of collectives and messages: argument checks, the data loop, the progress of slices.

All collectives start in `collectives`, which runs those on host memory and passes those on device
memory to `r2ccl.gpu`; messages start in `messaging`. `progress` is the data loop, `data_loop`
decides which thread runs it, `engine` runs the calls of one communicator in it, and `executor` the
steps of a plan.
"""
