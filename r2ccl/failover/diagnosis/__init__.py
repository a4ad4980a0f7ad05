"""Determines by probes from three points whether a local NIC, a remote NIC or a link failed."""
