"""Diagnosis: finds by probes which part of a path failed: a NIC, the link, the rail or the peer.

The probes are between the two ranks of the path, on its rail, on other rails and from one rail to
another; between one of its ports and a port of a third rank; and between two third ranks.
"""
