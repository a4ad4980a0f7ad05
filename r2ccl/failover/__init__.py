"""Surviving failures: one package a concept, with its state machine and what drives it.

==============  ===================================================================================
`migration`     the slices of a channel move from a path that failed to another
`diagnosis`     what failed: local NIC, remote NIC, link or slow peer
`health`        all ranks agree which NICs are down or slow, and from which call on
`bandwidth`     what each rail carries, measured from the traffic
`failback`      when a path that failed may carry work again
`shrink`        which ranks go on after deaths, and with what
==============  ===================================================================================

In each, ``protocol.py`` holds tables and pure state: it is fed events and answers with actions, and
sees no socket, thread or clock. ``driver.py`` feeds it and carries out what it says. `connector`
and `probes` serve several of them.
"""
