"""Measurement of collectives with the flags, sizes and bandwidths of nccl-tests."""
