"""Collectives on GPU memory: which backends there are, what GPUs are given, what the host does.

A call goes through `collectives` and one of the `backends`:

===============  ==================================================================================
`peer`           within a node, GPUs read and write each other's memory (CUDA IPC)
`hierarchical`   within nodes by `peer`, between them by another
`gpudirect`      NICs reach the memory of GPUs
`staged`         through pinned host memory
===============  ==================================================================================

`nic_affinity` and `pxn` have traffic take the NICs near to GPUs; `hardware` opens GPUs. Importing
this package imports none of them, nor a driver.
"""
