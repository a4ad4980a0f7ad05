"""Diagnosis: finds which part of a path is at fault, such as a NIC, the link or the peer.

A port that reports itself down gives the verdict. Otherwise pairs of ports are probed: one port of
each rank of the path, on the same rail or on different rails; a port of the path and a port of a
third rank; and ports of two third ranks.
"""
