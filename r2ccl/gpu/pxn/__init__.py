"""PXN: sends slices to distant NICs through the memory of the GPUs near these NICs, over NVLink."""
