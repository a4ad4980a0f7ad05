"""Short name of `r2ccl.interop.torch`; importing it registers the backend ``r2ccl`` with torch."""

from __future__ import annotations

from r2ccl.interop.torch import R2cclProcessGroup

__all__ = ["R2cclProcessGroup"]
