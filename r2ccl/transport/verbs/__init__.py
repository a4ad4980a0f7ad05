"""Verbs transport: one reliable queue pair per path; memory is registered with every RDMA NIC."""
