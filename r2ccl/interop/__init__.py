"""Other libraries' shapes over the same `Communicator`, for programs that were written for those.

`cupy` has the one of ``cupyx.distributed``. Nothing is decided here: names, arguments and defaults
are translated, and a communicator does the work.

Must not import anything below the public interface, nor the libraries whose shapes these are.
Invariant: what a shape cannot do is missing from it, and its docstring says so.
"""

from __future__ import annotations

__all__: list[str] = []
