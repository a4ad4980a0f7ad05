"""Fault tolerance: one package per concept, with the state machines apart from their drivers.

==============  ===================================================================================
`migration`     moves the slices of a channel from a failed path to another path
`diagnosis`     determines which part of a failed or silent path is at fault
`health`        makes all ranks plan with the same state of the NICs from the same collective on
`bandwidth`     measures the bandwidth of each rail from the traffic
`failback`      decides when a failed path is probed and used again
`shrink`        makes the surviving ranks agree on their new communicator
==============  ===================================================================================

In a package, ``protocol.py`` holds tables and pure state: it takes events, and uses no socket,
thread or clock. ``driver.py`` passes events to it and carries out the actions that follow.
`migration` has `path` and `link` in place of ``protocol.py``; `bandwidth` needs no driver.

`failover` dispatches events to the packages. `revocation` ends the communicator. `connector` and
`probes` serve several packages. `context` has the values that all parts of a rank's data plane
share. `exclusion` finds the ranks and rails that use the NICs that an operator has declared failed.
"""
