"""Paths over RDMA NICs by verbs: a reliable queue pair each, and memory every NIC reaches."""
