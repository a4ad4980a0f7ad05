"""PXN: slices reach and leave distant NICs through the GPUs near these NICs, over NVLink."""
