"""Collectives on GPU memory: which ways there are, what the device is given, what the host does.

A call goes through `calls` and one of the `ways`. On the memory of a node's GPUs: `nodecalls`, with
`nodejoin` and `noticeboard`; between such nodes: `tiers`. Over NICs: `direct`, with `directjoin`,
`standins`, `wired`, `operands` and `offload`; near NICs first: `nearness`, `detours`. Through
pinned memory: `bounce`, `windows`. All wait at a `gate`; `hardware` opens GPUs.

Importing this package imports none of them, nor a driver.
"""
