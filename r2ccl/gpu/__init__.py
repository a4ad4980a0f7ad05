"""Collectives on GPU memory.

`collectives` starts a call. One of these `backends` executes it:

===============  ==================================================================================
`peer`           within a node, GPUs read and write each other's memory (CUDA IPC)
`hierarchical`   `peer` within nodes, another backend between them
`gpudirect`      NICs read and write GPU memory
`staged`         copies through pinned host memory, in windows
`copied`         whole arrays are copied to pinned host memory, for scans, gathers, scatters,
                 alltoalls, allgatherv, and reduce_scatterv with parts of unequal size
===============  ==================================================================================

`nic_affinity` finds the NICs near each GPU, `pxn` reaches distant NICs through other GPUs, and
`hardware` opens GPUs. Importing this package imports none of its modules and loads no driver.
"""
