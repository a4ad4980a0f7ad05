"""Diagnosis: finds which part of a path is at fault, such as a NIC, the link or the peer.

A port that reports itself down is at fault. Otherwise ports are probed: those of the two ranks of
the path, on its rail, on other rails and from one rail to another; a port of the path and a port of
a third rank; and ports of two third ranks.
"""
