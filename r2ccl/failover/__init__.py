"""Fault tolerance: one package per concept, each with a state machine and its driver.

==============  ===================================================================================
`migration`     moves the slices of a channel from a failed path to another path
`diagnosis`     determines what failed: local NIC, remote NIC, link, rail or slow peer
`health`        makes all ranks agree which NICs are down or slow, and from which collective on
`bandwidth`     measures the bandwidth of each rail from the traffic
`failback`      decides when a failed path is probed and used again
`shrink`        makes the surviving ranks agree on their new communicator
==============  ===================================================================================

In each package, ``protocol.py`` holds tables and pure state: it takes events, returns actions, and
uses no socket, thread or clock. ``driver.py`` passes events to it and carries out its actions.
`failover` dispatches events to the packages. `connector` and `probes` serve several of them.
"""
