"""Failback: probes paths that failed, and decides when they may carry traffic again."""
