"""Planning results that are kept for later calls until their version of the health is outdated.

Invariant: when the first result for a new version of the health is kept, the results of all older
versions except the previous version are dropped. The previous version may still be in use, by calls
that ranks entered before they agreed on the new version.
"""

from __future__ import annotations

from typing import Any, TypeVar

#: Key of a result: the version of the health, followed by all else that the result depends on.
Key = TypeVar("Key", bound=tuple[int, *tuple[Any, ...]])
Value = TypeVar("Value")


class Kept(dict[Key, Value]):
    """Results by key. The first element of a key is the version of the health.

    Results are kept only to save time, so any result may be dropped. Several threads may keep
    results at once: for example, one explains a choice while another runs calls. Another thread may
    drop a result at any time, so look it up in one step, by `get` or with a handler of KeyError.

    Parameters
    ----------
    most : int
        Maximum number of results. Keeping one more drops the oldest.
    most_size : int, optional
        Maximum size of all results together, in a unit that the caller chooses, such as edges. A
        larger result is kept alone. Default: no limit.
    """

    def __init__(self, most: int, most_size: int | None = None) -> None:
        super().__init__()
        self._most = most
        self._most_size = most_size
        self._sizes: dict[Key, int] = {}
        #: Sum of `_sizes`. If two threads keep results at once, it may be inexact until the next
        #: version of the health.
        self._total = 0
        #: Newest version of the health in a key.
        self._newest = -1

    def keep(self, key: Key, value: Value, size: int = 0) -> Value:
        """Keep and return `value`, the result for `key`.

        Drop the oldest results if a limit would be exceeded. If the health version in `key` is new,
        also drop the results of the versions before the previous version. `size` is the size of
        `value`, in the unit of `most_size`; it is ignored if there is no `most_size`.
        """
        newest = self._newest
        if key[0] > newest:
            self._newest = key[0]
            for other in list(self):
                if other[0] < newest:
                    self._drop(other)
            self._total = sum(list(self._sizes.values()))
        self._drop(key)
        while self and (len(self) >= self._most or self._is_full(size)):
            self._drop(next(iter(list(self)), key))
        self[key] = value
        if self._most_size is not None:
            self._sizes[key] = size
            self._total += size
        return value

    def clear(self) -> None:
        """Drop all results."""
        super().clear()
        self._sizes.clear()
        self._total = 0

    def _is_full(self, size: int) -> bool:
        most = self._most_size
        return most is not None and self._total + size > most

    def _drop(self, key: Key) -> None:
        self.pop(key, None)
        self._total -= self._sizes.pop(key, 0)


__all__ = ["Kept"]
