"""PxnRoutes through the memory of other GPUs to the NICs beside them (NCCL's PXN)."""
