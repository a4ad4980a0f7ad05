"""PXN: slices reach far NICs through the memory of the GPUs beside them, over NVLink."""
