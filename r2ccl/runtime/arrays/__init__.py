"""Callers' arrays, of any library, on the host and on GPUs: where they are, without a copy."""
