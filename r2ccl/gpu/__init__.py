"""Collectives on GPU memory.

`collectives` starts a call, which one of these `backends` carries out:

===============  ==================================================================================
`peer`           within a node, GPUs read and write each other's memory (CUDA IPC)
`hierarchical`   `peer` within nodes, another backend between them
`gpudirect`      NICs read and write GPU memory
`staged`         copies through pinned host memory
===============  ==================================================================================

`nic_affinity` finds the NICs near each GPU, `pxn` reaches far ones through other GPUs, `hardware`
opens GPUs. Importing this package imports none of them, nor a driver.
"""
