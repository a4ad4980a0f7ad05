"""Diagnosis: finds by probes which part of a path failed: a NIC, the link, the rail or the peer.

The probes are between the two ports of the path, between one of these and a port of a third rank or
of another rail, and between two third ranks.
"""
