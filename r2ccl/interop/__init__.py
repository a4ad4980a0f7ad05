"""Interfaces of other libraries on top of `Communicator`, for programs written for those libraries.

`cupy` has the interface of ``cupyx.distributed``. The modules translate names, arguments and
defaults, and call a communicator. They use only the public interface of r2ccl and do not import the
other library.

Invariant: a function that r2ccl cannot provide is missing, and the module's docstring says so.
"""

from __future__ import annotations

__all__: list[str] = []
