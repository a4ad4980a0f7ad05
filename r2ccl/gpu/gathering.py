"""How ranks find something out together: each says something, and all hear what all have said.

A type alone, for the rooms that agree on something by it. Must not import what carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

#: Tells all ranks something and returns what they say, by rank. *Collective*: all ranks call it as
#: often, each time with as many bytes as the others.
Gather: TypeAlias = Callable[[bytes], Sequence[bytes]]

__all__ = ["Gather"]
