"""TCP transport: one socket per path; a probe is a TCP connect whose connection is never used."""
