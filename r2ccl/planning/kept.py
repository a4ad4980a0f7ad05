"""Results of planning that are kept for later calls, as long as the health may still be in use.

Invariant: results of a new version of the health drop those of all versions but the last two. The
last but one may still be in use by calls that ranks entered before they agreed on the new one.
"""

from __future__ import annotations

from typing import Any, TypeVar

#: Version of the health, and whatever else a result depends on.
Key = TypeVar("Key", bound=tuple[int, *tuple[Any, ...]])
Value = TypeVar("Value")


class Kept(dict[Key, Value]):
    """Results by key. The first element of a key is the version of the health.

    Results are only ever kept to save time, so any of them may be dropped.

    Parameters
    ----------
    most : int
        Maximum number of results. Further results drop the oldest.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        #: Newest version of the health in a key.
        self._newest = -1

    def keep(self, key: Key, value: Value) -> Value:
        """Keep `value`, the result for `key`, and return it."""
        newest = self._newest
        if key[0] > newest:
            self._newest = key[0]
            # Another thread may explain a choice, and keep results, at the same time.
            for other in list(self):
                if other[0] < newest:
                    self.pop(other, None)
        while len(self) >= self._most:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value


__all__ = ["Kept"]
