"""What failed: local NIC, remote NIC, link or slow peer, asked from three points."""
