"""Fault tolerance: one package per concept, each with its state machine separate from its driver.

==============  ===================================================================================
`migration`     moves the slices of a channel from a failed path to another path
`diagnosis`     determines which part of a failed or silent path is at fault
`health`        makes all ranks plan with the same state of the NICs from the same collective on
`bandwidth`     measures the bandwidth of each rail from the traffic
`failback`      decides when a failed path is probed and used again
`shrink`        makes the surviving ranks agree on their new communicator
==============  ===================================================================================

In a package, ``protocol.py`` contains tables and pure state: it takes events, and uses no socket,
thread or clock. ``driver.py`` passes events to ``protocol.py`` and carries out the resulting
actions. `migration` has `path` and `link` in place of ``protocol.py``; `bandwidth` needs no driver.

`failover` dispatches events to the packages. `revocation` ends the communicator. `connector` and
`probes` serve several packages. `context` has the values that all parts of a rank's data plane
share. `exclusion` maps NICs that an operator has declared failed to the ranks and rails using them.
"""
