"""Diagnosis: finds by probes which part of a path failed: a NIC, the link, the rail or the peer.

The probes are between the two ports of the path, between these and ports of third ranks or other
rails, and between two third ranks.
"""
