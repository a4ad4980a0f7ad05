"""TCP transport: one socket per path; probes are connects to a port on which nobody listens."""
